"""The fast loop and Lightning's loop are the same for callbacks, loggers and weights."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import Profiler

from littrainer import Trainer, TrainerCallback
from littrainer.lightning_adapter import fast_training_loop
from littrainer.lightning_adapter.fast_training_loop import HOOKS, NUM_TRAINER_CALLBACKS, FastEpochLoop, overrides_hook
from littrainer.optim.stepping import ClosureFirstOptimizer
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

BOTH_MODES = pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer], ids=["automatic", "manual"])


class Recorder(pl.Callback):
    """A callback that records the visible state in each hook, and logs in it."""

    def __init__(self, hooks: tuple[str, ...] = HOOKS) -> None:
        self.records: list[Any] = []
        for hook in hooks:
            setattr(self, hook, self._make_hook(hook))

    def _make_hook(self, hook: str) -> Callable[..., None]:
        def record(trainer: pl.Trainer, module: Any, *args: Any) -> None:
            module.log(f"seen_{hook}", float(len(self.records)), on_step=True, on_epoch=True, batch_size=1)
            loops = trainer.fit_loop.epoch_loop.state_dict()
            gradients = [gradient_of(parameter) for parameter in module.model.parameters()]
            self.records.append((hook, trainer.global_step, plain(args), loops, gradients, module._current_fx_name))

        return record


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    return None if parameter.grad is None else parameter.grad.clone()


def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, ClosureFirstOptimizer):
        value = value.optimizer
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


class Metrics(pl.loggers.Logger):
    """A logger that stores metrics."""

    name, version = "metrics", 0

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, dict(metrics)))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def run(folder: Path, is_fast: bool, kind: type[Trainer], further: list[Any], **arguments: Any) -> Trainer:
    with pytest.MonkeyPatch.context() as patch:
        if not is_fast:
            patch.setattr(fast_training_loop, "SUPPORTED_RELEASES", frozenset())
        settings = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "logging_steps": 1, **arguments}
        options = {"train_dataset": Rows(vector_rows(14)), "callbacks": further}
        trainer = quiet_trainer(folder, kind=kind, trainer_kwargs=options, **settings)
        trainer.train()
    assert (type(trainer.lightning_trainer.fit_loop.epoch_loop) is FastEpochLoop) is is_fast
    return trainer


def test_the_callbacks_of_a_trainer_are_two_and_have_no_hook_within_a_micro_batch(tmp_path: Path) -> None:
    callbacks = run(tmp_path, True, Trainer, []).lightning_trainer.callbacks
    assert len(callbacks) == NUM_TRAINER_CALLBACKS
    assert not [hook for hook in HOOKS[1:-1] for callback in callbacks if overrides_hook(callback, hook)]


@BOTH_MODES
@pytest.mark.parametrize("accumulation", [1, 3])
def test_callbacks_see_the_same_state_in_both_loops(tmp_path: Path, kind: type[Trainer], accumulation: int) -> None:
    results = []
    for is_fast in (True, False):
        recorder, metrics = Recorder(), Metrics()
        trainer = run(
            tmp_path / str(is_fast),
            is_fast,
            kind,
            [recorder],
            gradient_accumulation_steps=accumulation,
            lightning={"logger": metrics},
        )
        history = [
            {name: value for name, value in entry.items() if "runtime" not in name and "_per_" not in name}
            for entry in trainer.state.log_history
        ]
        weights = [parameter.tolist() for parameter in trainer.model.parameters()]
        records = [plain(entry) for entry in recorder.records]
        logged = [
            (step, {name: value for name, value in entry.items() if "seen_" in name or name == "epoch"})
            for step, entry in metrics.logged
        ]
        results.append((records, logged, weights, plain(history), trainer.lightning_trainer.global_step))
    fast, lightning = results
    assert len(fast[0]) == len(lightning[0]) > 14
    for fast_record, lightning_record in zip(fast[0], lightning[0], strict=True):
        assert fast_record == lightning_record
    assert fast[1:] == lightning[1:]


BOTH_LOOPS = pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "lightning"])


@BOTH_LOOPS
@pytest.mark.parametrize("hook", ["on_before_backward", "on_after_backward", "on_before_optimizer_step"])
def test_a_hook_that_a_forward_pass_sets_on_the_module_is_called_at_once(
    tmp_path: Path, is_fast: bool, hook: str
) -> None:
    calls = Mock()

    class SettingTrainer(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 3:
                setattr(self.lightning_module, hook, calls)
            return super().compute_loss(*args, **kwargs)

    trainer = run(tmp_path, is_fast, SettingTrainer, [], num_train_epochs=1)
    assert calls.call_count == trainer.state.global_step - 3 == 4


@BOTH_LOOPS
def test_a_callback_that_is_added_within_an_epoch_is_called(tmp_path: Path, is_fast: bool) -> None:
    late = Recorder(("on_train_batch_start",))

    class Adding(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                trainer.callbacks.append(late)

    run(tmp_path, is_fast, Trainer, [Adding()], num_train_epochs=1)
    # Including the micro-batch in which it is added, since it follows the callback that adds it.
    assert [entry[1] for entry in late.records] == [3, 4, 5, 6]


def test_a_hook_that_is_set_on_a_callback_within_an_epoch_is_called(tmp_path: Path) -> None:
    class Waiting(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                self.on_after_backward = hook  # type: ignore[method-assign]

    hook = Mock()
    trainer = run(tmp_path, True, Trainer, [Waiting()], num_train_epochs=1)
    assert hook.call_count == trainer.state.global_step - 3 == 4


@BOTH_MODES
@pytest.mark.parametrize(
    "hook, expected",
    [("on_train_batch_start", 4), ("on_after_backward", 4), ("on_after_batch_transfer", 3)],
)
def test_a_hook_that_is_set_on_the_module_within_an_epoch_is_called(
    tmp_path: Path, kind: type[Trainer], hook: str, expected: int
) -> None:
    results = []
    for is_fast in (True, False):
        calls: list[str] = []

        class Setting(pl.Callback):
            def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
                if batch_idx == 3 and trainer.current_epoch == 0:

                    def count_call(*args: Any) -> Any:
                        calls.append(hook)  # noqa: B023
                        return args[0] if args else None

                    setattr(module, hook, count_call)

            def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
                vars(module).pop(hook, None)

        recorder = Recorder()
        run(tmp_path / str(is_fast), is_fast, kind, [recorder, Setting()], gradient_accumulation_steps=2)
        results.append((calls, [plain(entry) for entry in recorder.records]))
    fast, lightning = results
    assert fast == lightning
    assert len(fast[0]) == expected or kind is StepwiseTrainer


@BOTH_LOOPS
def test_max_steps_that_is_set_within_an_epoch_ends_it(tmp_path: Path, is_fast: bool) -> None:
    class Limiting(pl.Callback):
        def on_train_batch_end(
            self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 1:
                trainer.fit_loop.epoch_loop.max_steps = 3

    assert run(tmp_path, is_fast, Trainer, [Limiting()]).state.global_step == 3


@pytest.mark.parametrize("error", [None, OverflowError, KeyboardInterrupt])
def test_no_worker_process_survives_an_epoch_that_ends_early(tmp_path: Path, error: Any) -> None:
    class Ending(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            during.extend(process for process in multiprocessing.active_children() if process not in before)
            if error is not None:
                raise error

    before, during = multiprocessing.active_children(), []
    options = {"train_dataset": Rows(vector_rows(64)), "callbacks": [Ending()]}
    trainer = quiet_trainer(tmp_path, trainer_kwargs=options, max_steps=1, dataloader_num_workers=1)
    if error is None:
        trainer.train()
    else:
        with pytest.raises(error):
            trainer.train()
    assert len(during) == 1
    assert set(multiprocessing.active_children()) <= set(before)
    assert copy.deepcopy(trainer).state.global_step == 1


class RecordingProfiler(Profiler):
    def __init__(self) -> None:
        super().__init__()
        self.actions: set[str] = set()

    def start(self, action_name: str) -> None:
        self.actions.add(action_name)

    def stop(self, action_name: str) -> None:
        pass


def test_a_profiler_gets_all_actions_of_lightning(tmp_path: Path) -> None:
    profiler = RecordingProfiler()
    trainer = run(tmp_path, True, Trainer, [], lightning={"profiler": profiler})
    assert not trainer.lightning_trainer.fit_loop.epoch_loop._is_fast
    assert {"run_training_batch", "[LightningModule]TrainerModule.optimizer_step"} <= profiler.actions


@BOTH_LOOPS
def test_a_lightning_callback_that_raises_stop_iteration_ends_the_epoch(tmp_path: Path, is_fast: bool) -> None:
    class Ending(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                raise StopIteration

    assert run(tmp_path, is_fast, Trainer, [Ending()]).state.global_step == 8


@BOTH_LOOPS
def test_a_stop_iteration_of_the_script_is_an_error(tmp_path: Path, is_fast: bool) -> None:
    class StopIterationTrainer(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise StopIteration("in the loss")

    with pytest.raises(StopIteration, match="in the loss"):
        run(tmp_path, is_fast, StopIterationTrainer, [])
