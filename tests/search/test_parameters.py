"""The parameters of a trial as arguments: names, types, rules and refusals."""

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
class ScriptArguments(TrainingArguments):
    """Arguments of a script with further fields and an attribute."""

    temperature: float = 1
    prompt: str | None = None
    layers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.constructions = getattr(self, "constructions", 0) + 1
        self.scale = 1.0


@pytest.fixture
def args(tmp_path: Path) -> Any:
    return quiet_arguments(tmp_path, ScriptArguments, max_steps=2)


# Argument, value of a trial, and resulting value of the same type.
CONVERSIONS: list[tuple[str, Any, Any]] = [
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


@pytest.mark.parametrize(("name", "drawn", "expected"), CONVERSIONS)
def test_a_value_is_converted_to_the_type_of_its_argument(args: Any, name: str, drawn: Any, expected: Any) -> None:
    set_parameters(args, {name: drawn})
    value = getattr(args, name)
    assert value == expected and type(value) is type(expected)
    # A fraction is not rounded if the script wrote a whole number.
    args.weight_decay = 0
    assert convert_parameter(args, "weight_decay", 0.1) == 0.1


@pytest.mark.parametrize(
    ("trainer_kwargs", "expected"),
    [
        ({"learning_rate": "fast"}, "learning_rate takes float"),
        ({"optim": "sdg"}, "optim takes OptimizerNames"),
        ({"seed": float("inf")}, "seed takes int"),
        ({"learning_rate": [0.1]}, "learning_rate takes float"),
    ],
)
def test_a_value_of_another_type_names_the_argument_and_its_type(args: Any, trainer_kwargs: Any, expected: str) -> None:
    with pytest.raises(SearchMistake, match=rf"A trial sets .*{expected}"):
        set_parameters(args, trainer_kwargs)


def test_unknown_names_are_skipped_with_a_warning(args: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert set_parameters(args, {"hidden": 16, "seed": 3}) == {"seed"}
    assert not hasattr(args, "hidden") and "A trial sets hidden" in caplog.text
    for rate in (0.1, 0.2):
        set_parameters(args, {"learning_rat": rate})
    assert caplog.text.count("A trial sets learning_rat, which ScriptArguments does not have, did you mean") == 1


def test_fields_and_attributes_of_a_scripts_arguments_are_set_without_running_its_constructor(args: Any) -> None:
    set_parameters(args, {"layers": 4, "scale": 0.5})
    assert (args.layers, args.scale, args.constructions) == (4, 0.5, 1)


@pytest.mark.parametrize(
    ("trainer_kwargs", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"fp16": True, "bf16": True}, "fp16 and bf16"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, "load_best_model_at_end"),
    ],
)
def test_the_constructors_rules_are_checked_and_all_or_no_values_are_set(
    args: Any, trainer_kwargs: Any, message: str
) -> None:
    before = dict(vars(args))
    with pytest.raises(ValueError, match=message):
        set_parameters(args, trainer_kwargs)
    assert vars(args) == before


def test_dependent_arguments_are_updated(args: Any) -> None:
    set_parameters(args, {"eval_strategy": "steps", "logging_steps": 7, "metric_for_best_model": "accuracy"})
    assert (args.eval_steps, args.greater_is_better, args.do_eval) == (7, True, True)
    set_parameters(args, {"metric_for_best_model": "loss"})
    assert args.greater_is_better is False


@pytest.mark.filterwarnings("ignore:warmup_ratio:FutureWarning")
def test_earlier_names_set_the_present_arguments_and_a_warmup_is_not_applied_twice(tmp_path: Path) -> None:
    args = quiet_arguments(tmp_path, warmup_ratio=0.5)
    for trainer_kwargs, steps in (({"warmup_steps": 3}, 3), ({"warmup_ratio": 0.2}, 2), ({"learning_rate": 0.1}, 2)):
        set_parameters(args, trainer_kwargs)
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
def test_a_wrong_space_ends_the_search_with_the_reason(tmp_path: Path, space: Any, message: str) -> None:
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
