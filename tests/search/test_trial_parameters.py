"""From a trial's parameters to arguments: names, types, rules, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch

from littrainer import TrainingArguments
from littrainer.arguments.choices import OptimizerNames, SchedulerType
from littrainer.callbacks.state import hp_params
from littrainer.search.failures import SearchMistake
from littrainer.search.searching import searching
from littrainer.search.trial import begin_trial, set_up_trial
from littrainer.search.trial_parameters import converted, set_parameters
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_arguments
from tests.search.trainers import searched_trainer


@dataclass
class OwnArguments(TrainingArguments):
    """Arguments of a script, with fields and an attribute of its own."""

    temperature: float = 1
    prompt: str | None = None
    layers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.times_made = getattr(self, "times_made", 0) + 1
        self.scale = 1.0


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    made = searched_trainer(tmp_path)
    made.args = quiet_arguments(tmp_path, OwnArguments, max_steps=2)
    return made


# What a trial gives, what an argument is then, its type included.
CONVERTED: list[tuple[str, Any, Any]] = [
    ("weight_decay", 0.1, 0.1),
    ("learning_rate", "1e-3", 1e-3),
    ("learning_rate", 1, 1.0),
    ("learning_rate", np.float64(0.5), 0.5),
    ("learning_rate", torch.tensor(0.5), 0.5),
    ("num_train_epochs", 2, 2.0),
    ("seed", 3.7, 3),
    ("seed", "8", 8),
    ("seed", "8.0", 8),
    ("seed", np.int64(9), 9),
    ("per_device_train_batch_size", 16.0, 16),
    ("bf16", True, True),
    ("remove_unused_columns", "False", False),
    ("remove_unused_columns", "true", True),
    ("remove_unused_columns", 0, False),
    ("remove_unused_columns", np.bool_(False), False),
    ("optim", "sgd", OptimizerNames.SGD),
    ("lr_scheduler_type", SchedulerType.COSINE, SchedulerType.COSINE),
    ("lr_scheduler_type", "cosine", SchedulerType.COSINE),
    ("run_name", 3, "3"),
    ("max_grad_norm", None, None),
    ("lr_scheduler_kwargs", {"num_cycles": 2}, {"num_cycles": 2}),
    ("temperature", 0.5, 0.5),
    ("prompt", "Say", "Say"),
    ("layers", 3.9, 3),
]


@pytest.mark.parametrize(("name", "given", "expected"), CONVERTED)
def test_a_value_becomes_what_its_argument_declares(trainer: Any, name: str, given: Any, expected: Any) -> None:
    found = converted(trainer.args, name, given.item() if hasattr(given, "item") else given)
    assert found == expected
    assert type(found) is type(expected)


def test_the_type_of_the_value_before_does_not_count(trainer: Any) -> None:
    trainer.args.weight_decay = 0
    set_parameters(trainer, {"weight_decay": 0.1, "temperature": 0.3})
    assert (trainer.args.weight_decay, trainer.args.temperature) == (0.1, 0.3)


def test_whole_numbers_of_a_script_stay_whole(trainer: Any) -> None:
    trainer.args.num_train_epochs = 3
    set_parameters(trainer, {"num_train_epochs": 2.0})
    assert type(trainer.args.num_train_epochs) is int


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("learning_rate", "fast", "learning_rate takes float"),
        ("seed", "one", "seed takes int"),
        ("bf16", "perhaps", "bf16 takes bool"),
        ("remove_unused_columns", 2, "remove_unused_columns takes"),
        ("optim", "sdg", "did you mean 'sgd'"),
        ("seed", float("inf"), "seed takes int"),
    ],
)
def test_a_value_of_another_type_names_the_argument_and_its_type(
    trainer: Any, name: str, value: Any, expected: str
) -> None:
    with pytest.raises(SearchMistake, match=rf"A trial sets {name}=.*{expected}"):
        set_parameters(trainer, {name: value})


def test_a_value_that_only_the_constructor_refuses_is_told_of_as_a_trials(trainer: Any) -> None:
    with pytest.raises(SearchMistake, match=r"A trial sets .*learning_rate=\[0\.1\] is a list"):
        set_parameters(trainer, {"learning_rate": [0.1]})


def test_an_unknown_name_suggests_the_nearest_one_and_changes_nothing(trainer: Any) -> None:
    before = dict(vars(trainer.args))
    with pytest.raises(SearchMistake, match=r"'learning_rat' is unknown, did you mean 'learning_rate'\?"):
        set_parameters(trainer, {"seed": 3, "learning_rat": 0.1})
    assert vars(trainer.args) == before


@pytest.mark.parametrize("name", ["train_batch_size", "to_dict", "_asked_for_bars", "n_gpu"])
def test_what_is_no_argument_cannot_be_set(trainer: Any, name: str) -> None:
    with pytest.raises(SearchMistake, match=f"'{name}' is unknown"):
        set_parameters(trainer, {name: 3})


def test_a_name_for_the_model_that_is_all_but_an_argument_is_refused(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, model_init=lambda trial: VectorClassifier())
    with pytest.raises(SearchMistake, match=r"'learnin_rate' is no argument .*did you mean 'learning_rate'\?"):
        set_parameters(trainer, {"learnin_rate": 0.1})


def test_a_name_for_the_model_that_is_like_an_argument_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = searched_trainer(tmp_path, model_init=lambda trial: VectorClassifier())
    for rate in (0.1, 0.2):
        set_parameters(trainer, {"learning_tempo": rate, "hidden_width": 3})
    told = [record.getMessage() for record in caplog.records if "model_init alone gets it" in record.getMessage()]
    assert len(told) == 1 and "Or is it 'learning_rate'?" in told[0]


def test_names_for_a_model_init_that_takes_the_trial_are_let_through(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, model_init=lambda trial: VectorClassifier())
    assert set_parameters(trainer, {"hidden": 16, "seed": 3}) == {"seed"}
    assert not hasattr(trainer.args, "hidden")


def test_fields_and_attributes_of_a_scripts_own_arguments_are_set(trainer: Any) -> None:
    set_parameters(trainer, {"layers": 4, "scale": 0.5})
    assert (trainer.args.layers, trainer.args.scale) == (4, 0.5)


def test_the_constructor_of_a_scripts_own_arguments_is_not_run_again(trainer: Any) -> None:
    set_parameters(trainer, {"layers": 4})
    assert trainer.args.times_made == 1


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"fp16": True, "bf16": True}, "fp16 and bf16"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, "load_best_model_at_end"),
        ({"seed": -1}, "seed"),
    ],
)
def test_values_keep_the_rules_of_the_constructor_and_all_or_none_are_set(
    trainer: Any, parameters: dict[str, Any], message: str
) -> None:
    before = dict(vars(trainer.args))
    with pytest.raises(ValueError, match=message):
        set_parameters(trainer, parameters)
    assert vars(trainer.args) == before


def test_what_follows_from_values_is_filled_in(trainer: Any) -> None:
    set_parameters(trainer, {"eval_strategy": "steps", "logging_steps": 7, "metric_for_best_model": "accuracy"})
    assert (trainer.args.eval_steps, trainer.args.greater_is_better, trainer.args.do_eval) == (7, True, True)


def test_another_metric_than_the_one_before_decides_anew_what_is_better(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, metric_for_best_model="loss")
    assert trainer.args.greater_is_better is False
    set_parameters(trainer, {"metric_for_best_model": "accuracy"})
    assert trainer.args.greater_is_better is True


@pytest.mark.filterwarnings("ignore:warmup_ratio:FutureWarning")
def test_a_warmup_that_the_arguments_were_made_with_does_not_come_back(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, warmup_ratio=0.5)
    set_parameters(trainer, {"warmup_steps": 3})
    assert trainer.args.get_warmup_steps(10) == 3
    set_parameters(trainer, {"warmup_ratio": 0.2})
    assert trainer.args.get_warmup_steps(10) == 2
    set_parameters(trainer, {"learning_rate": 0.1})
    assert trainer.args.get_warmup_steps(10) == 2


def test_earlier_names_count_as_what_they_mean_today(trainer: Any) -> None:
    with pytest.warns(FutureWarning, match="per_gpu_train_batch_size"):
        set_parameters(trainer, {"per_gpu_train_batch_size": 2, "gradient_checkpointing": True})
    assert trainer.args.per_device_train_batch_size == 2
    assert trainer.args.activation_checkpointing is True


@pytest.mark.parametrize("name", ["report_to", "disable_tqdm"])
def test_what_is_read_only_when_a_trainer_is_made_is_refused(trainer: Any, name: str) -> None:
    with pytest.raises(SearchMistake, match=f"A trial cannot set {name}"):
        set_parameters(trainer, {name: True})


def test_the_entry_that_ray_keeps_for_wandb_is_no_parameter(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    with searching(trainer, "some backend", "minimize"):
        set_up_trial(trainer, {"wandb": {"project": "x"}, "seed": 3})
        assert trainer.args.seed == 3


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (lambda trial: None, "hp_space returned nothing"),
        (lambda trial: [trial.suggest_int("seed", 1, 2)], "hp_space returned a list"),
        (lambda trial: {}, "hp_space returned an empty dict"),
        (lambda trial: {3: 4}, "a dict with 3 as a key"),
        (lambda trial: 1 / 0, "hp_space failed: ZeroDivisionError"),
        (lambda trial: {"seed": trial.suggest_int("seed", 5, 1)}, "hp_space failed: ValueError"),
    ],
)
def test_a_space_that_is_wrong_ends_the_search_with_the_reason(tmp_path: Path, space: Any, message: str) -> None:
    trainer = searched_trainer(tmp_path)
    trials: list[Any] = []
    with pytest.raises(SearchMistake, match=message):
        trainer.hyperparameter_search(lambda trial: trials.append(trial) or space(trial), n_trials=3, backend="optuna")
    assert len(trials) == 1


def test_an_empty_dict_is_a_space_where_the_model_asks_the_trial(tmp_path: Path) -> None:
    def new(trial: Any) -> VectorClassifier:
        return VectorClassifier(8 if trial is None else trial.suggest_int("hidden", 4, 6))

    trainer = searched_trainer(tmp_path, model_init=new)
    best = trainer.hyperparameter_search(lambda trial: {}, n_trials=1, backend="optuna")
    assert set(best.hyperparameters) == {"hidden"}


def test_a_trial_leaves_the_next_one_its_seed_alone_and_what_transformers_would_keep_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = searched_trainer(tmp_path, weight_decay=0)
    with searching(trainer, "some backend", "minimize"):
        for _ in range(2):
            begin_trial(trainer, {})
            set_up_trial(trainer, {"weight_decay": 0.5, "seed": 3, "label_smoothing_factor": 0.1})
            assert (trainer.args.weight_decay, trainer.args.seed) == (0.5, 3)
            begin_trial(trainer, {})
            set_up_trial(trainer, {"learning_rate": 0.5, "label_smoothing_factor": 0.2})
            assert (trainer.args.weight_decay, trainer.args.seed) == (0, 3)
    assert trainer.args.seed == 42
    assert [record.getMessage() for record in caplog.records] == [
        "weight_decay of a trial is 0.5; transformers makes it 0, of the former type.",
        "label_smoothing_factor of a trial counts; transformers trains with that of the Trainer's construction.",
        "Each trial begins with weight_decay as the search did; transformers keeps what a trial made of it.",
        "Each trial begins with learning_rate as the search did; transformers keeps what a trial made of it.",
    ]


def test_parameters_of_a_trial_are_read_from_optunas_trials_and_from_dicts() -> None:
    trial = optuna.trial.FixedTrial({"seed": 3, "data_seed": 4})
    trial.suggest_int("seed", 1, 5)
    assert hp_params(trial) == {"seed": 3}
    assert hp_params({"seed": 3}) == {"seed": 3}
    with pytest.raises(RuntimeError, match="A trial is a list"):
        hp_params([3])
