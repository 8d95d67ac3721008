"""Evaluation by a plain loop, or by Lightning's loop if callbacks or keywords of Lightning require it."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler

from littrainer import Trainer, TrainerCallback
from littrainer.data.resume.rng import get_rng_states
from littrainer.lightning_adapter.module import TrainerModule
from tests.fidelity.first_difference import first_difference
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import NoisyClassifier
from tests.scenarios.trainers import quiet_trainer

ROWS = 5
EACH_STEP: dict[str, Any] = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1}


@pytest.fixture
def lightning_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the module's steps that Lightning calls."""
    names: list[str] = []
    for name in ("validation_step", "predict_step"):
        step = getattr(TrainerModule, name)

        def record_step(self: Any, batch: Any, batch_idx: int, step: Any = step, name: str = name) -> Any:
            names.append(name)
            return step(self, batch, batch_idx)

        monkeypatch.setattr(TrainerModule, name, record_step)
    return names


def trainer_over_many_batches(folder: Path, *callbacks: Any, **changes: Any) -> Trainer:
    keywords = {"eval_dataset": Rows(vector_rows(ROWS, seed=1)), "compute_metrics": accuracy, "callbacks": [*callbacks]}
    return quiet_trainer(folder, NoisyClassifier(), trainer_kwargs=keywords, per_device_eval_batch_size=1, **changes)


def run_all_evaluations(trainer: Trainer) -> list[Any]:
    """Evaluate and predict outside of training, evaluate within, and return the results."""
    metrics = trainer.evaluate()
    prediction = trainer.predict(trainer.eval_dataset)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    values = [metrics, prediction.predictions, prediction.metrics, *history]
    timeless = [
        {name: number for name, number in value.items() if not name.endswith(("_runtime", "_second", "_time"))}
        if isinstance(value, dict)
        else value
        for value in values
    ]
    return [*timeless, [module.training for module in trainer.model.modules()], get_rng_states()]


class Listening(pl.Callback):
    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.batches.append(sorted(batch))

    def on_predict_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        self.batches.append(sorted(batch))


def test_lightnings_loop_and_the_plain_loop_are_equivalent(tmp_path: Path, lightning_steps: list[str]) -> None:
    torch.manual_seed(0)
    plain = run_all_evaluations(trainer_over_many_batches(tmp_path, **EACH_STEP))
    assert lightning_steps == []
    torch.manual_seed(0)
    callback = Listening()
    by_lightning = run_all_evaluations(trainer_over_many_batches(tmp_path, callback, **EACH_STEP))
    assert first_difference(plain, by_lightning) is None
    assert callback.batches == [["labels", "x"]] * ROWS * 3
    assert lightning_steps == [*["validation_step"] * ROWS, *["predict_step"] * ROWS, *["validation_step"] * ROWS]


def add_hook(hook: str) -> Callable[[Trainer], None]:
    def add(trainer: Trainer) -> None:
        callback = pl.Callback()
        setattr(callback, hook, lambda *_: None)
        trainer.add_callback(callback)

    return add


def add_profiler(trainer: Trainer) -> None:
    trainer.lightning_keywords["profiler"] = SimpleProfiler()


@pytest.mark.parametrize(
    ("change", "outside", "inside"),
    [(add_hook("on_validation_end"), 3, 3), (add_hook("on_train_batch_end"), 3, 0), (add_profiler, 3, 3)],
    ids=["a callback", "a callback of training alone", "a profiler"],
)
def test_lightnings_loop_runs_if_a_hook_or_keyword_requires_it(
    tmp_path: Path, lightning_steps: list[str], change: Callable[[Trainer], None], outside: int, inside: int
) -> None:
    trainer = quiet_trainer(tmp_path, **EACH_STEP)
    change(trainer)
    trainer.evaluate()
    assert len(lightning_steps) == outside
    trainer.train()
    assert len(lightning_steps) == outside + inside


@pytest.mark.parametrize("error", [StopIteration("own"), KeyboardInterrupt(), OverflowError("own")])
@pytest.mark.parametrize("callbacks", [[], [Listening()]], ids=["plain", "lightning"])
def test_an_error_is_raised_unchanged_and_a_later_evaluation_works(
    tmp_path: Path, error: BaseException, callbacks: list[Any]
) -> None:
    class Failing(Trainer):
        error: BaseException | None = None

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.error is not None:
                raise self.error
            return super().prediction_step(*args, **kwargs)

    trainer: Any = quiet_trainer(tmp_path, kind=Failing, trainer_kwargs={"callbacks": callbacks})
    before = trainer.evaluate()
    trainer.error = error
    with pytest.raises(type(error)) as caught:
        trainer.evaluate()
    assert caught.value is error and torch.is_grad_enabled()
    trainer.error = None
    assert trainer.evaluate()["eval_loss"] == before["eval_loss"]


def test_a_signal_interrupts_an_evaluation_after_the_current_batch(tmp_path: Path) -> None:
    batches: list[int] = []

    class Stopped(Trainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            batches.append(len(batches))
            if len(batches) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().prediction_step(*args, **kwargs)

    class Terminated(Exception):
        pass

    def terminate(*_: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(Terminated):
            quiet_trainer(tmp_path, kind=Stopped, per_device_eval_batch_size=1).evaluate()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert batches == [0, 1, 2]


def test_nested_evaluations_are_independent(tmp_path: Path) -> None:
    inner: list[float] = []

    class Evaluating(TrainerCallback):
        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            if not inner:
                inner.append(0)
                inner[0] = trainer.evaluate(Rows(vector_rows(4, seed=3)))["eval_loss"]

    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [Evaluating()]})
    outer = trainer.evaluate()["eval_loss"]
    plain = quiet_trainer(tmp_path)
    assert outer == plain.evaluate()["eval_loss"]
    assert inner == [plain.evaluate(Rows(vector_rows(4, seed=3)))["eval_loss"]]


def test_the_data_of_an_evaluation_is_released(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path)
    data = Rows(vector_rows(5))
    trainer.evaluate(data)
    trainer.callback_handler.eval_dataloader = None
    reference = weakref.ref(data)
    del data
    gc.collect()
    assert reference() is None
