from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from littrainer import Trainer, TrainerCallback
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

SEQUENCES = [
    [0.5, 0.4, 0.45, 0.4, 0.3],
    [float("nan"), 0.5, float("nan"), 0.6],
    [0.2, 0.2],
    [-1.0, -2.0, 3.0],
]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    settings = {"metric_for_best_model": "quality", "save_strategy": "steps"}
    folder = tmp_path_factory.mktemp("best")
    args = quiet_arguments(folder, transformers.TrainingArguments, **settings)
    return quiet_trainer(folder, **settings), transformers.Trainer(model=VectorClassifier(), args=args)


@pytest.mark.parametrize("values", SEQUENCES, ids=str)
@pytest.mark.parametrize(("greater", "strategy"), [(True, "steps"), (False, "no")])
def test_the_best_evaluation_is_the_same_as_in_transformers(
    trainers: tuple[Any, Any], values: list[float], greater: bool, strategy: str
) -> None:
    histories = []
    for trainer in trainers:
        trainer.args.greater_is_better = greater
        trainer.args.save_strategy = type(trainer.args.save_strategy)(strategy)
        trainer.state = type(trainer.state)()
        history = []
        for step, value in enumerate(values, 1):
            trainer.state.global_step = step
            is_new = trainer._determine_best_metric(metrics={"eval_quality": value}, trial=None)
            history.append((bool(is_new), trainer.state.best_metric, trainer.state.best_global_step))
        histories.append(history)
    assert histories[0] == histories[1]


@pytest.mark.parametrize("value", ["good", [0.5]], ids=str)
def test_a_best_metric_that_is_no_number_is_named_with_its_value_and_step(tmp_path: Path, value: Any) -> None:
    trainer = quiet_trainer(
        tmp_path,
        trainer_kwargs={"compute_metrics": lambda _: {"quality": value}},
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="quality",
    )
    with pytest.raises(TypeError, match=r"metric_for_best_model='quality'.*optimizer step 1 .*eval_quality="):
        trainer.train()


@pytest.mark.parametrize("value", [np.float64(0.5), torch.tensor(0.5), np.array(0.5), True], ids=str)
def test_a_number_of_any_kind_can_be_the_best_metric(tmp_path: Path, value: Any) -> None:
    trainer = quiet_trainer(tmp_path, metric_for_best_model="quality")
    assert trainer._determine_best_metric({"eval_quality": value}, trial=None)


def over_two_datasets(folder: Path, kind: Any = Trainer, **changes: Any) -> Any:
    datasets = {"near": Rows(vector_rows(4)), "far": Rows(vector_rows(5))}
    settings = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, **changes}
    return quiet_trainer(folder, kind=kind, trainer_kwargs={"eval_dataset": datasets}, **settings)


def test_a_best_metric_that_names_no_dataset_of_several_is_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = over_two_datasets(tmp_path, metric_for_best_model="loss")
    with pytest.raises(KeyError, match=r"'loss'.*'eval_near_loss' or 'eval_far_loss'"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("name", ["near_loss", "eval_far_loss"])
def test_a_best_metric_can_be_from_any_of_several_datasets(tmp_path: Path, name: str) -> None:
    trainer = over_two_datasets(tmp_path, metric_for_best_model=name, greater_is_better=False)
    trainer.train()
    assert trainer.state.best_metric is not None


def test_metrics_that_a_script_names_itself_are_looked_for_in_what_it_returns(tmp_path: Path) -> None:
    class Naming(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            return {"eval_loss": 0.25}

    trainer = over_two_datasets(tmp_path, Naming, metric_for_best_model="loss", greater_is_better=False)
    trainer.train()
    assert trainer.state.best_metric == 0.25


def test_memory_that_runs_out_in_an_evaluation_does_not_shrink_the_training_batch(tmp_path: Path) -> None:
    class Large(VectorClassifier):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            if not self.training:
                raise RuntimeError("CUDA out of memory. Tried to allocate")
            return super().forward(x, labels)

    trainer = quiet_trainer(
        tmp_path, Large(), auto_find_batch_size=True, max_steps=1, eval_strategy="steps", eval_steps=1
    )
    with pytest.raises(RuntimeError, match=r"Memory ran out.*optimizer step 1,.*per_device_eval_batch_size") as caught:
        trainer.train()
    assert "out of memory" in str(caught.value.__cause__)
    assert trainer._train_batch_size == 4


class StopAt(TrainerCallback):
    """Callback that stops training at an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step >= self.step


# Arguments, the optimizer step of a stop, and the steps that are evaluated, of at most five in two epochs.
LAST_EVALUATIONS: list[tuple[dict[str, Any], int, list[int]]] = [
    ({}, 9, [5]),
    ({}, 2, [2]),
    ({"eval_strategy": "steps", "eval_steps": 2}, 9, [2, 4, 5]),
    ({"eval_strategy": "steps", "eval_steps": 2}, 3, [2, 3]),
    ({"eval_strategy": "steps", "eval_steps": 2}, 4, [2, 4]),
    ({"eval_strategy": "epoch"}, 9, [3, 5]),
    ({"eval_strategy": "epoch", "eval_delay": 7, "save_strategy": "epoch"}, 9, [5]),
    ({"save_strategy": "epoch"}, 4, [4]),
]


@pytest.mark.parametrize(("changes", "stop", "evaluated"), LAST_EVALUATIONS, ids=str)
def test_eval_at_end_evaluates_the_last_step_once_before_the_summary(
    tmp_path: Path, changes: dict[str, Any], stop: int, evaluated: list[int]
) -> None:
    trainer = quiet_trainer(
        tmp_path, trainer_kwargs={"callbacks": [StopAt(stop)]}, max_steps=5, eval_at_end=True, **changes
    )
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == evaluated
    assert "train_loss" in trainer.state.log_history[-1]


@pytest.mark.parametrize("is_best", [True, False])
def test_a_last_evaluation_that_is_the_best_is_saved_and_loaded(tmp_path: Path, is_best: bool) -> None:
    qualities = iter([0.5, 0.75 if is_best else 0.25])
    trainer = quiet_trainer(
        tmp_path,
        trainer_kwargs={"callbacks": [StopAt(3)], "compute_metrics": lambda _: {"quality": next(qualities)}},
        max_steps=5,
        eval_at_end=True,
        **dict.fromkeys(("eval_strategy", "save_strategy"), "steps"),
        **dict.fromkeys(("eval_steps", "save_steps"), 2),
        load_best_model_at_end=True,
        metric_for_best_model="quality",
    )
    trainer.train()
    assert [path.name for path in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-2", "checkpoint-3"][
        : 1 + is_best
    ]
    assert trainer.state.best_global_step == (3 if is_best else 2)
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{trainer.state.best_global_step}")


def test_eval_at_end_without_an_evaluation_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="eval_at_end asks for evaluations, but there is no eval_dataset"):
        quiet_trainer(tmp_path, trainer_kwargs={"eval_dataset": None}, eval_at_end=True)
