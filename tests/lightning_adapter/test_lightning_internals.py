"""The protected names of Lightning that lightning_internals.py uses, in the installed release.

If a test fails, update the function that it calls, or exclude the release in pyproject.toml.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities import registry
from torch.utils.data import DataLoader

import littrainer
from littrainer.lightning_adapter import lightning_internals

PACKAGE = Path(littrainer.__file__).parent
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Probe(pl.LightningModule):
    """A module that records its validation steps."""

    def __init__(self, on_batch_end: Callable[[Probe], None] = lambda _: None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.on_batch_end = on_batch_end
        self.records: list[Any] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def on_train_batch_end(self, *_: Any) -> None:
        self.on_batch_end(self)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.records.append((batch, batch_idx, self.trainer.validating, torch.is_grad_enabled(), self.training))


def fit(on_batch_end: Callable[[Probe], None] = lambda _: None, **keywords: Any) -> Probe:
    module = Probe(on_batch_end)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, **{**QUIET, **keywords})
    trainer.fit(module, DataLoader(torch.ones(3, 1)))
    return module


def test_an_evaluation_inside_fit_validates_each_batch_and_restores_fit() -> None:
    states: list[Any] = []

    def evaluate(module: Probe) -> None:
        trainer: Any = module.trainer
        before = (trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector._first_loop_iter)
        lightning_internals.evaluate_inside_fit(trainer, ["a", "b"])
        after = (trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector._first_loop_iter)
        states.append((before == after, trainer.training, module.training, torch.is_grad_enabled()))

    module = fit(evaluate)
    assert module.records == [("a", 0, True, False, False), ("b", 1, True, False, False)] * 3
    assert states == [(True, True, True, True)] * 3
    assert module.trainer.global_step == 3


def test_a_failed_evaluation_inside_fit_restores_the_trained_weights_and_fit() -> None:
    class Averaging(pl.callbacks.WeightAveraging):
        def on_validation_epoch_start(self, trainer: Any, *_: Any) -> None:
            states.append("averaged")

        def on_validation_epoch_end(self, *_: Any) -> None:
            states.append("trained")

    class FailingBatches(list[str]):
        def __iter__(self) -> Iterator[str]:
            yield "a"
            raise OverflowError

    states: list[Any] = []

    def evaluate(module: Probe) -> None:
        trainer: Any = module.trainer
        val_loop = trainer.fit_loop.epoch_loop.val_loop
        with pytest.raises(OverflowError):
            lightning_internals.evaluate_inside_fit(trainer, FailingBatches("ab"))
        states.append((trainer.fit_loop.epoch_loop.val_loop is val_loop, trainer.training))

    fit(evaluate, callbacks=[Averaging()])
    assert states == ["averaged", "trained", (True, True)] * 3


def test_signal_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Any] = []
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    connector = getattr(trainer, "_signal_connector", None)
    assert callable(getattr(connector, "register_signal_handlers", None))
    # Otherwise several processes would broadcast at each micro-batch.
    assert callable(getattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", None))
    before = signal.getsignal(signal.SIGTERM)
    for is_disabled in (False, True):
        if is_disabled:
            lightning_internals.disable_signal_handling(trainer)
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(Probe(lambda _: handlers.append(signal.getsignal(signal.SIGTERM))), DataLoader(torch.ones(1, 1)))
    assert handlers[0] is not before and handlers[1] is before
    assert signal.getsignal(signal.SIGTERM) is before


class Ends(pl.Callback):
    def __init__(self) -> None:
        self.records: list[str] = []

    def on_validation_epoch_end(self, *_: Any) -> None:
        self.records.append("epoch end")

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.records.append(f"end {trainer.validating} {torch.is_grad_enabled()}")


def test_call_callback_hooks() -> None:
    class Monitoring(Ends, pl.callbacks.Checkpoint): ...

    callback, monitoring = Ends(), Monitoring()
    states: list[Any] = []

    def evaluate(module: Probe) -> None:
        trainer: Any = module.trainer
        end = lightning_internals.evaluate_inside_fit(trainer, ["a"])
        states.append((callback.records[:], monitoring.records[:]))
        end(False)
        states.append((callback.records[1:], monitoring.records[1:]))
        end(True)
        states.append((callback.records[1:], monitoring.records[1:], trainer.training))

    fit(evaluate, callbacks=[callback, monitoring], enable_checkpointing=True, limit_train_batches=1)
    ended = ["end True False"]
    assert states == [(["epoch end"], ["epoch end"]), (ended, []), (ended, ended, True)]


def test_max_batches() -> None:
    shown: list[Any] = []

    class Showing(Probe):
        def on_validation_start(self) -> None:
            lightning_internals.set_displayed_batch_count(self.trainer, 7)
            shown.append(self.trainer.num_val_batches)

        def predict_step(self, batch: Any, batch_idx: int) -> tuple[()]:
            return ()

        def on_predict_start(self) -> None:
            lightning_internals.set_displayed_batch_count(self.trainer, 7)
            shown.append(self.trainer.num_predict_batches)

    class Endless(list[str]):
        def __len__(self) -> int:
            return 2**40

    trainer = pl.Trainer(accelerator="cpu", **QUIET)
    module = Showing()
    trainer.validate(module, Endless("abc"), verbose=False)
    trainer.predict(module, Endless("abc"))
    assert shown == [[7], [7]] and len(module.records) == 3


def test_checkpoint_connector_user_managed_and_ckpt_path(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    def fail(_: Probe) -> None:
        raise OverflowError

    def trainer() -> pl.Trainer:
        callbacks: Any = [OnExceptionCheckpoint(str(tmp_path), "last")]
        keywords = {**QUIET, "enable_checkpointing": True}
        return pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, **keywords)

    with pytest.raises(OverflowError):
        trainer().fit(Probe(fail), DataLoader(torch.ones(2, 1)))
    steps: list[int] = []
    for should_resume in (True, False):
        lightning_trainer = trainer()
        if not should_resume:
            lightning_internals.disable_auto_resume(lightning_trainer)
        lightning_trainer.fit(
            Probe(lambda module: steps.append(module.trainer.global_step)), DataLoader(torch.ones(2, 1))
        )
    # Lightning alone resumes after the first of two steps.
    assert steps == [2, 1, 2]


def test_batches_that_stepped() -> None:
    trainer = pl.Trainer(accelerator="cpu", max_epochs=3, **QUIET)
    lightning_internals.restore_progress(trainer, epochs=2, optimizer_steps=6)
    records: list[Any] = []

    def note(module: Probe) -> None:
        steps = trainer.fit_loop.epoch_loop._batches_that_stepped
        records.append((trainer.current_epoch, trainer.global_step, steps))

    trainer.fit(Probe(note), DataLoader(torch.ones(3, 1)))
    assert records == [(2, 7, 6), (2, 8, 7), (2, 9, 8)]


@pytest.mark.parametrize("automatic", [True, False])
def test_lightning_optimizers_on_before_step_and_on_after_step(automatic: bool) -> None:
    replacements: list[torch.optim.Optimizer] = []

    class Replacing(Probe):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = automatic

        def replace(self) -> None:
            replacements.append(torch.optim.SGD(self.parameters(), lr=0.0))
            lightning_internals.replace_optimizer(self.trainer, replacements[0])

        def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
            if automatic and batch_idx == 1:
                self.replace()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if not automatic and batch_idx == 1:
                # Lightning's wrapper counts the steps of this micro-batch.
                self.replace()
            loss = super().training_step(batch, batch_idx)
            if not automatic:
                self.manual_backward(loss)
                self.trainer.strategy._lightning_optimizers[0].step()
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.records.append(self.layer.weight.item())

    module = Replacing()
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(torch.ones(3, 1)))
    assert trainer.optimizers == replacements and trainer.global_step == 3
    # The replacement has a rate of 0.
    assert module.records[0] == module.records[1] == module.records[2]


def test_validation_is_enabled_while_callbacks_are_set_up() -> None:
    values: list[bool] = []

    class Reader(pl.Callback):
        def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
            for has_validation in (True, False):
                lightning_internals.set_validation_enabled(trainer, module, has_validation)
                values.append(trainer.enable_validation)

    module = fit(callbacks=[Reader()])
    assert values == [True, False] and module.records == []


def test_entry_points_are_read_once_for_all_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    cached: Any = registry.entry_points
    pl.Trainer(**QUIET)
    misses = cached.cache_info().misses
    pl.Trainer(**QUIET)
    assert cached.cache_info().misses == misses and cached.cache_info().hits > 0
    assert not lightning_internals.has_registered_callbacks()
    entry_point = metadata.EntryPoint("timer", "lightning.pytorch.callbacks:Timer", "group")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry_point])
    assert lightning_internals.has_registered_callbacks()
