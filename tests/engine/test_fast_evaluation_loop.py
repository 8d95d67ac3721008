"""Evaluations through Lightning's own loop and without it are the same, as far as anybody can see."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer import call

from littrainer import Trainer, TrainerCallback
from littrainer.checkpoint.random_state import capture_random_states
from littrainer.commands.differences import first_difference
from littrainer.engine import fast_evaluation_loop
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import NoisyClassifier
from tests.scenarios.trainers import quiet_trainer


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each pass without Lightning's loop: whether it was a prediction."""
    found: list[bool] = []
    pass_over = fast_evaluation_loop.pass_over

    def noting(trainer: Any, batches: Any, is_prediction: bool = False) -> None:
        found.append(is_prediction)
        pass_over(trainer, batches, is_prediction)

    monkeypatch.setattr(fast_evaluation_loop, "pass_over", noting)
    return found


class Watching(Trainer):
    """Notes what can be seen of Lightning in each step of an evaluation; logs through it."""

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        found = super().prediction_step(*args, **kwargs)
        running: Any = self.lightning_module
        if running is not None:
            running.log("seen", float(len(self.seen)), on_step=True, on_epoch=True, batch_size=1)
            lightning = running.trainer
            modes = [one.training for one in self.model.modules()]
            stage = (lightning.state.fn, lightning.state.stage, lightning.state.status)
            self.seen.append((running._current_fx_name, stage, modes, torch.is_grad_enabled()))
        return found

    seen: list[Any]


def seen_and_found(folder: Path, is_fast: bool) -> tuple[Any, ...]:
    with pytest.MonkeyPatch.context() as patch:
        if not is_fast:
            patch.setattr(fast_evaluation_loop, "KNOWN_RELEASES", frozenset())
        trainer = quiet_trainer(
            folder, NoisyClassifier(), kind=Watching, given={"compute_metrics": accuracy},
            max_steps=3, eval_strategy="steps", eval_steps=1, eval_on_start=True, logging_steps=1,
        )  # fmt: skip
        trainer.seen = []
        found = [trainer.evaluate(), trainer.evaluate(), trainer.predict(trainer.eval_dataset)]
        trainer.train()
        lightning: Any = trainer.lightning_trainer
        logged = [dict(one) for one in (lightning.callback_metrics, lightning.logged_metrics)]
        found += [trainer.evaluate(), trainer.predict(trainer.eval_dataset)]
        modes = [one.training for one in trainer.model.modules()]
    return trainer.seen, logged, found, trainer.state.log_history, modes, capture_random_states()


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_times(one) for name, one in value.items() if not name.endswith(TIMES)}
    if isinstance(value, (list, tuple)):
        return [without_times(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


TIMES = ("_runtime", "_second", "_time")


def test_what_is_seen_logged_and_found_is_the_same(tmp_path: Path, passes: list[bool]) -> None:
    torch.manual_seed(0)
    fast = seen_and_found(tmp_path / "fast", is_fast=True)
    assert passes == [False, True] + [False] * 4 + [False, True]
    torch.manual_seed(0)
    own = seen_and_found(tmp_path / "own", is_fast=False)
    assert len(passes) == 8 and len(fast[0]) == 12
    assert without_times(fast[:-1]) == without_times(own[:-1])
    assert first_difference(fast[-1], own[-1]) is None


def listening(hook: str) -> Callable[[Trainer], None]:
    def add(trainer: Trainer) -> None:
        callback = pl.Callback()
        setattr(callback, hook, lambda *_: None)
        trainer.add_callback(callback)

    return add


def with_keywords(trainer: Trainer) -> None:
    trainer.lightning_keywords["profiler"] = SimpleProfiler()


@pytest.mark.parametrize(
    "change",
    [listening("on_validation_start"), listening("on_validation_batch_end"), with_keywords],
    ids=["a callback", "a callback of batches", "a profiler"],
)
def test_where_somebody_may_listen_lightnings_own_loop_runs(
    tmp_path: Path, passes: list[bool], change: Callable[[Trainer], None]
) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1)
    change(trainer)
    trainer.evaluate()
    trainer.evaluate()
    trainer.train()
    assert passes == []


def test_a_callback_that_hears_of_training_alone_keeps_evaluations_inside_it_short(
    tmp_path: Path, passes: list[bool]
) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1)
    listening("on_train_batch_end")(trainer)
    trainer.train()
    assert passes == [False]
    # Outside of training each evaluation sets callbacks up.
    trainer.evaluate()
    trainer.evaluate()
    assert passes == [False]


def test_a_debug_log_of_lightning_has_every_hook(
    tmp_path: Path, passes: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, call.log.name):
        trainer = quiet_trainer(tmp_path)
        trainer.evaluate()
        trainer.evaluate()
    assert passes == []


def test_a_hook_that_a_script_sets_on_the_module_is_called(tmp_path: Path, passes: list[bool]) -> None:
    heard: list[int] = []

    class Setting(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            module: Any = trainer.lightning_module
            module.on_validation_batch_start = lambda batch, batch_idx: heard.append(batch_idx)

    trainer = quiet_trainer(
        tmp_path, given={"callbacks": [Setting()]}, max_steps=1, eval_strategy="steps", eval_steps=1
    )
    trainer.train()
    assert heard == [0] and passes == []


class Failing(Trainer):
    error: BaseException | None = None

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.error is not None:
            raise self.error
        return super().prediction_step(*args, **kwargs)


@pytest.mark.parametrize("error", [StopIteration("own"), KeyboardInterrupt(), OverflowError("own")])
def test_errors_leave_an_evaluation_as_they_are(tmp_path: Path, passes: list[bool], error: BaseException) -> None:
    trainer = quiet_trainer(tmp_path, kind=Failing)
    before = trainer.evaluate()
    trainer.error = error  # type: ignore[attr-defined]
    with pytest.raises(type(error)) as caught:
        trainer.evaluate()
    assert caught.value is error and passes == [False] and trainer.idle_evaluator is None
    trainer.error = None  # type: ignore[attr-defined]
    assert trainer.evaluate()["eval_loss"] == before["eval_loss"]
    assert torch.is_grad_enabled()


class LoggingValue(Trainer):
    """Logs a value in each step of an evaluation; evaluates within one, or fails in a later one, where told to."""

    value = 1.0
    fails_in = 0
    is_to_nest = False
    nested_found: float | None = None

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        running: Any = self.lightning_module
        running.log("seen", self.value, on_step=False, on_epoch=True, batch_size=1)
        self.fails_in -= 1
        if self.fails_in == 0:
            raise OverflowError
        if self.is_to_nest:
            self.is_to_nest, self.value = False, 100.0
            self.evaluate()
            self.nested_found, self.value = found_under_seen(self), 1.0
            # The first value of another name under the same hook must leave what was collected alone.
            running.log("seen too", self.value, on_step=False, on_epoch=True, batch_size=1)
        return super().prediction_step(*args, **kwargs)


def found_under_seen(trainer: Any) -> float:
    return float(trainer.lightning_trainer.callback_metrics["seen"])


@pytest.mark.parametrize("is_nested", [False, True])
def test_what_one_evaluation_logs_is_not_averaged_with_what_another_did(
    tmp_path: Path, passes: list[bool], is_nested: bool
) -> None:
    found: list[float] = []

    class Evaluating(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.is_to_nest = is_nested
            if not is_nested:
                trainer.value, trainer.fails_in = 100.0, 2
                with pytest.raises(OverflowError):
                    trainer.evaluate()
                trainer.value = 1.0
            trainer.evaluate()
            found.append(found_under_seen(trainer))

    given = {"eval_dataset": Rows(vector_rows(6)), "callbacks": [Evaluating()]}
    trainer: Any = quiet_trainer(tmp_path, kind=LoggingValue, given=given, max_steps=1, per_device_eval_batch_size=2)
    trainer.train()
    assert len(passes) == 2 and found == [1.0]
    assert trainer.nested_found == (100.0 if is_nested else None)


@pytest.mark.parametrize("is_fast", [True, False])
def test_an_evaluation_outside_fit_begins_with_nothing_logged(
    tmp_path: Path, passes: list[bool], is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_fast:
        monkeypatch.setattr(fast_evaluation_loop, "KNOWN_RELEASES", frozenset())

    class Once(Trainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            if lightning_module is not None:
                lightning_module.log("seen", 1.0, batch_size=1)
            return super().prediction_step(*args, **kwargs)

    lightning_module: Any = None
    trainer: Any = quiet_trainer(tmp_path, kind=Once)
    trainer.evaluate()
    lightning_module = trainer.idle_evaluator.module
    trainer.evaluate()
    assert found_under_seen(trainer) == 1.0
    lightning_module = None
    trainer.evaluate()
    assert dict(trainer.lightning_trainer.callback_metrics) == {}
    assert passes == [False, False] * is_fast
