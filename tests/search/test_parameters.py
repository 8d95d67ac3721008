"""From a trial's parameters to arguments: names, types, rules, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from littrainer import TrainingArguments
from littrainer.arguments.choices import OptimizerNames, SchedulerType
from littrainer.search import parameters
from littrainer.search.parameters import SearchMistake, convert_parameter, set_parameters
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
def args(tmp_path: Path) -> Any:
    return quiet_arguments(tmp_path, OwnArguments, max_steps=2)


# What a trial gives, what an argument is then, its type included.
CONVERTED: list[tuple[str, Any, Any]] = [
    ("weight_decay", 0.1, 0.1),
    ("learning_rate", "1e-3", 1e-3),
    ("learning_rate", torch.tensor(0.5), 0.5),
    ("temperature", 2.0, 2),
    ("seed", 3.7, 3),
    ("seed", np.int64(9), 9),
    ("per_device_train_batch_size", 16.0, 16),
    ("remove_unused_columns", "False", False),
    ("remove_unused_columns", 0, False),
    ("optim", "sgd", OptimizerNames.SGD),
    ("lr_scheduler_type", "cosine", SchedulerType.COSINE),
    ("lr_scheduler_kwargs", {"num_cycles": 2}, {"num_cycles": 2}),
]


@pytest.mark.parametrize(("name", "given", "expected"), CONVERTED)
def test_a_value_becomes_what_it_was_before(args: Any, name: str, given: Any, expected: Any) -> None:
    set_parameters(args, {name: given})
    found = getattr(args, name)
    assert found == expected and type(found) is type(expected)
    # A fraction stays one if the script wrote a whole number.
    args.weight_decay = 0
    assert convert_parameter(args, "weight_decay", 0.1) == 0.1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"learning_rate": "fast"}, "learning_rate takes float"),
        ({"optim": "sdg"}, "optim takes OptimizerNames"),
        ({"seed": float("inf")}, "seed takes int"),
        ({"learning_rate": [0.1]}, "learning_rate takes float"),
    ],
)
def test_a_value_of_another_type_names_the_argument_and_its_type(args: Any, given: Any, expected: str) -> None:
    with pytest.raises(SearchMistake, match=rf"A trial sets .*{expected}"):
        set_parameters(args, given)


def test_names_that_are_no_arguments_are_passed_over_with_a_warning(
    args: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert set_parameters(args, {"hidden": 16, "seed": 3}) == {"seed"}
    assert not hasattr(args, "hidden") and "A trial sets hidden" in caplog.text
    for rate in (0.1, 0.2):
        set_parameters(args, {"learning_rat": rate})
    assert caplog.text.count("A trial sets learning_rat, which OwnArguments does not have, did you mean") == 1


def test_fields_and_attributes_of_a_scripts_arguments_are_set_without_running_its_constructor(args: Any) -> None:
    set_parameters(args, {"layers": 4, "scale": 0.5})
    assert (args.layers, args.scale, args.times_made) == (4, 0.5, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"fp16": True, "bf16": True}, "fp16 and bf16"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, "load_best_model_at_end"),
    ],
)
def test_values_keep_the_rules_of_the_constructor_and_all_or_none_are_set(args: Any, given: Any, message: str) -> None:
    before = dict(vars(args))
    with pytest.raises(ValueError, match=message):
        set_parameters(args, given)
    assert vars(args) == before


def test_what_follows_from_values_is_filled_in(args: Any) -> None:
    set_parameters(args, {"eval_strategy": "steps", "logging_steps": 7, "metric_for_best_model": "accuracy"})
    assert (args.eval_steps, args.greater_is_better, args.do_eval) == (7, True, True)
    set_parameters(args, {"metric_for_best_model": "loss"})
    assert args.greater_is_better is False


@pytest.mark.filterwarnings("ignore:warmup_ratio:FutureWarning")
def test_earlier_names_count_as_what_they_mean_today_and_a_warmup_does_not_come_back(tmp_path: Path) -> None:
    args = quiet_arguments(tmp_path, warmup_ratio=0.5)
    for given, steps in (({"warmup_steps": 3}, 3), ({"warmup_ratio": 0.2}, 2), ({"learning_rate": 0.1}, 2)):
        set_parameters(args, given)
        assert args.get_warmup_steps(10) == steps
    with pytest.warns(FutureWarning, match="per_gpu_train_batch_size"):
        set_parameters(args, {"per_gpu_train_batch_size": 2, "gradient_checkpointing": True})
    assert args.per_device_train_batch_size == 2 and args.activation_checkpointing is True


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (lambda trial: None, "hp_space returned nothing"),
        (lambda trial: [trial.suggest_int("seed", 1, 2)], "hp_space returned a list"),
        (lambda trial: {"seed": trial.suggest_int("seed", 5, 1)}, "hp_space failed: ValueError"),
    ],
)
def test_a_space_that_is_wrong_ends_the_search_with_the_reason(tmp_path: Path, space: Any, message: str) -> None:
    trainer = searched_trainer(tmp_path)
    trials: list[Any] = []
    with pytest.raises(SearchMistake, match=message):
        trainer.hyperparameter_search(
            lambda trial: trials.append(trial) or space(trial), n_trials=3, catch=(Exception,)
        )
    assert len(trials) == 1


def test_the_default_space_of_a_sweep_is_that_of_transformers() -> None:
    import transformers.trainer_utils as theirs

    assert parameters.default_hp_space_wandb(None) == theirs.default_hp_space_wandb(None)
