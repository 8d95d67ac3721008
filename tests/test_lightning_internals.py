"""One test for each protected name of Lightning that the package touches, and one for what they do together.

When a release of Lightning changes one of them, the test that carries its name fails.
"""

from __future__ import annotations

import ast
import inspect
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

import littrainer
from littrainer import lightning_internals

PACKAGE = Path(littrainer.__file__).parent
ADVICE = "lightning_internals.evaluate_inside_fit has to follow, or pyproject.toml has to hold this release back"


class Probe(pl.LightningModule):
    """A module that notes what Lightning does with it; it can evaluate inside fit."""

    def __init__(self, at_each_batch: Callable[[Probe], None] = lambda _: None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.at_each_batch = at_each_batch
        self.seen: list[Any] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def on_train_batch_end(self, *_: Any) -> None:
        self.at_each_batch(self)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch, batch_idx, self.trainer.validating, torch.is_grad_enabled(), self.training))


def fit(at_each_batch: Callable[[Probe], None] = lambda _: None, **keywords: Any) -> Probe:
    module = Probe(at_each_batch)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, enable_model_summary=False, barebones=False, **{**quiet, **keywords}
    )
    trainer.fit(module, DataLoader(torch.ones(3, 1)))
    return module


def needed(found: bool, name: str) -> None:
    assert found, f"Lightning {pl.__version__} has no {name} as it is used here: {ADVICE}"


def test_evaluation_loop() -> None:
    from lightning.pytorch.loops import evaluation_loop

    loop = getattr(evaluation_loop, "_EvaluationLoop", None)
    needed(loop is not None, "lightning.pytorch.loops.evaluation_loop._EvaluationLoop")
    parameters = inspect.signature(loop).parameters
    expected = ["trainer", "trainer_fn", "stage", "verbose", "inference_mode"]
    needed([*parameters] == expected, f"_EvaluationLoop({', '.join(expected)})")
    needed(callable(getattr(loop, "run", None)), "_EvaluationLoop.run()")


def test_trainer_fn_and_running_stage() -> None:
    from lightning.pytorch.trainer import states

    for kind, member in (("TrainerFn", "FITTING"), ("RunningStage", "VALIDATING")):
        needed(hasattr(getattr(states, kind, None), member), f"lightning.pytorch.trainer.states.{kind}.{member}")


def test_data_source() -> None:
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn

    loop: Any = _EvaluationLoop(pl.Trainer(barebones=True), TrainerFn.FITTING, RunningStage.VALIDATING)
    needed(hasattr(getattr(loop, "_data_source", None), "instance"), "_EvaluationLoop._data_source.instance")


def test_fit_loop_epoch_loop_val_loop() -> None:
    epoch_loop = getattr(getattr(pl.Trainer(barebones=True), "fit_loop", None), "epoch_loop", None)
    needed(hasattr(epoch_loop, "val_loop"), "Trainer.fit_loop.epoch_loop.val_loop")


def test_first_loop_iter() -> None:
    found: list[bool] = []
    fit(lambda module: found.append(hasattr(module.trainer._logger_connector, "_first_loop_iter")))
    needed(found == [True] * 3, "Trainer._logger_connector._first_loop_iter")


def test_validating_and_training() -> None:
    stages: list[Any] = []

    def switch(module: Probe) -> None:
        module.trainer.validating = True
        stages.append((module.trainer.validating, module.trainer.training))
        module.trainer.training = True
        stages.append((module.trainer.validating, module.trainer.training))

    fit(switch)
    needed(stages == [(True, False), (False, True)] * 3, "Trainer.validating and Trainer.training that can be set")


def test_accumulate_grad_batches() -> None:
    steps: list[int] = []

    def never_step(module: Probe) -> None:
        steps.append(module.trainer.global_step)
        module.trainer.accumulate_grad_batches = 2**62

    # Lightning steps at the last batch of an epoch whatever the number is, so the second of three says it.
    fit(never_step)
    needed(steps[:2] == [1, 1], "Trainer.accumulate_grad_batches that can be set for each batch")


def test_an_evaluation_inside_fit_sees_each_batch_as_a_validation_and_leaves_fit_as_it_was() -> None:
    states: list[Any] = []

    def evaluate(module: Probe) -> None:
        trainer: Any = module.trainer
        before = (trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector._first_loop_iter)
        lightning_internals.evaluate_inside_fit(trainer, ["a", "b"])
        after = (trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector._first_loop_iter)
        states.append((before == after, trainer.training, module.training, torch.is_grad_enabled()))

    module = fit(evaluate)
    assert module.seen == [("a", 0, True, False, False), ("b", 1, True, False, False)] * 3, ADVICE
    assert states == [(True, True, True, True)] * 3, ADVICE
    assert module.trainer.global_step == 3


def test_an_evaluation_that_fails_inside_fit_leaves_fit_as_it_was() -> None:
    def broken() -> Iterator[str]:
        yield "a"
        raise OverflowError

    class Broken:
        def __iter__(self) -> Iterator[str]:
            return broken()

        def __len__(self) -> int:
            return 2

    states: list[Any] = []

    def evaluate(module: Probe) -> None:
        trainer: Any = module.trainer
        own_loop = trainer.fit_loop.epoch_loop.val_loop
        with pytest.raises(OverflowError):
            lightning_internals.evaluate_inside_fit(trainer, Broken())
        states.append((trainer.fit_loop.epoch_loop.val_loop is own_loop, trainer.training))

    fit(evaluate)
    assert states == [(True, True)] * 3


def test_signal_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Any] = []
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    advice = "lightning_internals.leave_signals_alone has to follow, or pyproject.toml has to hold this release back"
    connector = getattr(trainer, "_signal_connector", None)
    assert callable(getattr(connector, "register_signal_handlers", None)), advice
    before = signal.getsignal(signal.SIGTERM)
    for leave_alone in (False, True):
        if leave_alone:
            lightning_internals.leave_signals_alone(trainer)
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(Probe(lambda _: handlers.append(signal.getsignal(signal.SIGTERM))), DataLoader(torch.ones(1, 1)))
    assert handlers[0] is not before and handlers[1] is before, advice
    assert signal.getsignal(signal.SIGTERM) is before


TESTED_HERE = {"_EvaluationLoop", "_data_source", "_logger_connector", "_first_loop_iter", "_signal_connector"}


def protected_names_in(path: Path) -> set[str]:
    """Names with one leading underscore that are imported from Lightning, or read from anything but `self` or `cls`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning"):
            names.update(alias.name for alias in node.names)
        if isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_every_protected_name_in_that_file_is_tested_here() -> None:
    assert protected_names_in(PACKAGE / "lightning_internals.py") == TESTED_HERE


@pytest.mark.parametrize("file", ["module.py", "engine.py", "strategies.py", "callbacks/bridge.py"])
def test_no_other_file_that_knows_lightning_touches_a_protected_name_of_it(file: str) -> None:
    # The Trainer's own protected methods are overridable in transformers too, so the module calls them by name.
    own = {name for name in dir(littrainer.Trainer) if name.startswith("_")} | {"_model_is_prepared"}
    assert protected_names_in(PACKAGE / file) - own == set()
