"""One test for each protected name of Lightning that the package touches, and one for what they do together.

When a release of Lightning changes one of them, the test that carries its name fails.
"""

from __future__ import annotations

import ast
import inspect
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

import littrainer
from littrainer.engine import lightning_internals

PACKAGE = Path(littrainer.__file__).parent
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
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
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, **{**QUIET, **keywords})
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


def test_data_fetcher() -> None:
    found: list[bool] = []
    fit(lambda module: found.append(callable(getattr(module.trainer.fit_loop._data_fetcher, "__iter__", None))))
    needed(found == [True] * 3, "Trainer.fit_loop._data_fetcher.__iter__()")


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
    # Another name would be asked at each micro-batch of several processes, and waited for.
    assert callable(getattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", None)), advice
    before = signal.getsignal(signal.SIGTERM)
    for leave_alone in (False, True):
        if leave_alone:
            lightning_internals.leave_signals_alone(trainer)
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(Probe(lambda _: handlers.append(signal.getsignal(signal.SIGTERM))), DataLoader(torch.ones(1, 1)))
    assert handlers[0] is not before and handlers[1] is before, advice
    assert signal.getsignal(signal.SIGTERM) is before


def test_end_of_an_evaluation() -> None:
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop

    for name in ("on_run_start", "_on_evaluation_epoch_end", "_on_evaluation_end"):
        needed(callable(getattr(_EvaluationLoop, name, None)), f"_EvaluationLoop.{name}()")
    needed(list(inspect.signature(_EvaluationLoop._on_evaluation_epoch_end).parameters) == ["self"], "such a hook")


class Ends(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_validation_epoch_end(self, *_: Any) -> None:
        self.seen.append("epoch end")

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.seen.append(f"end {trainer.validating} {torch.is_grad_enabled()}")


def test_call_callback_hooks() -> None:
    class Monitoring(Ends, pl.callbacks.Checkpoint): ...

    others, monitoring = Ends(), Monitoring()
    states: list[Any] = []

    def evaluate(module: Probe) -> None:
        trainer: Any = module.trainer
        end = lightning_internals.evaluate_inside_fit(trainer, ["a"])
        states.append((others.seen[:], monitoring.seen[:]))
        end(False)
        states.append((others.seen[1:], monitoring.seen[1:]))
        end(True)
        states.append((others.seen[1:], monitoring.seen[1:], trainer.training))

    fit(evaluate, callbacks=[others, monitoring], enable_checkpointing=True, limit_train_batches=1)
    ended = ["end True False"]
    assert states == [(["epoch end"], ["epoch end"]), (ended, []), (ended, ended, True)], ADVICE


def test_an_evaluation_that_is_broken_off_says_so_while_its_last_hooks_are_due() -> None:
    told: list[str] = []

    def evaluate(module: Probe) -> None:
        def fail() -> Iterator[str]:
            raise OverflowError
            yield

        class Broken(list[str]):
            def __iter__(self) -> Iterator[str]:
                return fail()

        with pytest.raises(OverflowError):
            lightning_internals.evaluate_inside_fit(module.trainer, Broken(["a"]), lambda: told.append("broken off"))

    fit(evaluate, limit_train_batches=1)
    assert told == ["broken off"]


def test_max_batches() -> None:
    shown: list[Any] = []

    class Showing(Probe):
        def on_validation_start(self) -> None:
            lightning_internals.show_number_of_batches(self.trainer, 7)
            shown.append(self.trainer.num_val_batches)

        def predict_step(self, batch: Any, batch_idx: int) -> tuple[()]:
            return ()

        def on_predict_start(self) -> None:
            lightning_internals.show_number_of_batches(self.trainer, 7)
            shown.append(self.trainer.num_predict_batches)

    class Endless(list[str]):
        def __len__(self) -> int:
            return 2**40

    trainer = pl.Trainer(accelerator="cpu", **QUIET)
    module = Showing()
    trainer.validate(module, Endless("abc"), verbose=False)
    trainer.predict(module, Endless("abc"))
    assert shown == [[7], [7]] and len(module.seen) == 3, ADVICE


def test_checkpoint_connector_user_managed_and_ckpt_path(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    advice = "lightning_internals.resume_nothing has to follow, or pyproject.toml has to hold this release back"

    def fail(_: Probe) -> None:
        raise OverflowError

    def trainer() -> pl.Trainer:
        callbacks: Any = [OnExceptionCheckpoint(str(tmp_path), "last")]
        keywords = {**QUIET, "enable_checkpointing": True}
        return pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, **keywords)

    with pytest.raises(OverflowError):
        trainer().fit(Probe(fail), DataLoader(torch.ones(2, 1)))
    steps: list[int] = []
    for resumes in (True, False):
        one = trainer()
        if not resumes:
            lightning_internals.resume_nothing(one)
        one.fit(Probe(lambda module: steps.append(module.trainer.global_step)), DataLoader(torch.ones(2, 1)))
    # Lightning by itself goes on behind the first of two steps.
    assert steps == [2, 1, 2], advice


def test_batches_that_stepped() -> None:
    advice = "lightning_internals.count_from has to follow, or pyproject.toml has to hold this release back"
    trainer = pl.Trainer(accelerator="cpu", max_epochs=3, **QUIET)
    lightning_internals.count_from(trainer, epochs=2, optimizer_steps=6)
    seen: list[Any] = []

    def note(module: Probe) -> None:
        steps = trainer.fit_loop.epoch_loop._batches_that_stepped
        seen.append((trainer.current_epoch, trainer.global_step, steps))

    trainer.fit(Probe(note), DataLoader(torch.ones(3, 1)))
    assert seen == [(2, 7, 6), (2, 8, 7), (2, 9, 8)], advice


@pytest.mark.parametrize("automatic", [True, False])
def test_lightning_optimizers_on_before_step_and_on_after_step(automatic: bool) -> None:
    advice = "lightning_internals.replace_optimizer has to follow, or pyproject.toml has to hold this release back"
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
                # Lightning has set on its wrapper what counts the steps of this micro-batch.
                self.replace()
            loss = super().training_step(batch, batch_idx)
            if not automatic:
                self.manual_backward(loss)
                self.trainer.strategy._lightning_optimizers[0].step()
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.seen.append(self.layer.weight.item())

    module = Replacing()
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(torch.ones(3, 1)))
    assert trainer.optimizers == replacements and trainer.global_step == 3, advice
    # A rate of 0 leaves the weight as the first optimizer left it.
    assert module.seen[0] == module.seen[1] == module.seen[2], advice


def test_validations_are_announced_while_callbacks_are_set_up() -> None:
    said: list[bool] = []

    class Asking(pl.Callback):
        def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
            for are_announced in (True, False):
                lightning_internals.announce_validations(trainer, module, are_announced)
                said.append(trainer.enable_validation)

    module = fit(callbacks=[Asking()])
    assert said == [True, False] and module.seen == []


def test_entry_points_of_the_registry() -> None:
    from lightning.fabric.utilities import registry
    from lightning.pytorch.trainer.connectors import callback_connector

    load = getattr(callback_connector, "_load_external_callbacks", None)
    own = getattr(registry, "entry_points", None)
    needed(own is metadata.entry_points, "lightning.fabric.utilities.registry.entry_points")
    needed(getattr(load, "__globals__", None) is vars(registry), "callback_connector._load_external_callbacks")


def install_callbacks(folder: Path, package: str) -> None:
    """Install a package, into a folder on the path, that gives each `lightning.Trainer` a callback."""
    (folder / f"{package}.py").write_text(
        "import lightning.pytorch as pl\n\nclass Installed(pl.Callback):\n    pass\n\n"
        "def callbacks():\n    return [Installed()]\n"
    )
    (folder / f"{package}-1.0.dist-info").mkdir()
    (folder / f"{package}-1.0.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
    )
    (folder / f"{package}-1.0.dist-info" / "entry_points.txt").write_text(
        f"[lightning.pytorch.callbacks_factory]\nours = {package}:callbacks\n"
    )


def built_without_reading_again() -> list[str]:
    with lightning_internals.entry_points_read_once():
        return [type(callback).__name__ for callback in pl.Trainer(**QUIET).callbacks]  # type: ignore[attr-defined]


def test_entry_points_are_read_for_the_first_trainer_and_when_a_package_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def entry_points(group: str) -> Any:
        reads.append(group)
        return inspect.unwrap(metadata.entry_points)(group=group)

    monkeypatch.setattr(lightning_internals, "entry_points", entry_points)
    monkeypatch.setattr("lightning.fabric.utilities.registry.entry_points", entry_points)
    # Other tests may write to the working folder meanwhile, which then looks as if a package had been installed there.
    elsewhere = [folder for folder in sys.path if Path(folder).resolve() != Path.cwd()]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *elsewhere])
    # A folder of compiled modules beside it would look like another package.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert [built_without_reading_again() for _ in range(3)] == [[], [], []]
    assert reads == ["lightning.pytorch.callbacks_factory"]
    install_callbacks(tmp_path, "package_with_callbacks")
    assert [built_without_reading_again() for _ in range(2)] == [["Installed"], ["Installed"]]
    assert len(reads) == 2


def test_entry_points_that_somebody_has_put_in_place_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = metadata.EntryPoint("ours", "lightning.pytorch.callbacks:Timer", "lightning.pytorch.callbacks_factory")
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda self: lambda: [pl.callbacks.Timer()])
    monkeypatch.setattr("lightning.fabric.utilities.registry.entry_points", lambda group: (ours,))
    assert built_without_reading_again() == ["Timer"]


def test_other_trainers_of_lightning_read_entry_points_themselves() -> None:
    from lightning.fabric.utilities import registry

    own = registry.entry_points
    with lightning_internals.entry_points_read_once(), lightning_internals.entry_points_read_once():
        assert registry.entry_points is not own
    assert registry.entry_points is own


TESTED_HERE = {
    "_EvaluationLoop",
    "_data_fetcher",
    "_data_source",
    "_logger_connector",
    "_first_loop_iter",
    "_signal_connector",
    "_on_evaluation_epoch_end",
    "_call_callback_hooks",
    "_checkpoint_connector",
    "_user_managed",
    "_ckpt_path",
    "_batches_that_stepped",
    "_broadcast_sigterm_tensor",
    "_lightning_optimizers",
    "_on_before_step",
    "_on_after_step",
}


@pytest.mark.parametrize("name", ["_setup_model", "configure_ddp", "block_backward_sync", "setup", "teardown"])
def test_methods_of_the_ddp_strategy_that_ours_replaces_or_calls(name: str) -> None:
    assert callable(getattr(DDPStrategy, name, None)), "strategies/data_parallel.py has to follow"


def test_what_a_ddp_strategy_was_given_is_found_on_it() -> None:
    given: Any = DDPStrategy(ddp_comm_state="state", ddp_comm_hook=print, ddp_comm_wrapper=abs)
    assert (given._ddp_comm_state, given._ddp_comm_hook, given._ddp_comm_wrapper) == ("state", print, abs)
    assert given._layer_sync is None and given._start_method == "popen"


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
    assert protected_names_in(PACKAGE / "engine" / "lightning_internals.py") == TESTED_HERE


@pytest.mark.parametrize(
    "file",
    [
        "module.py",
        "engine.py",
        "strategies/data_parallel.py",
        "strategies/user_strategy.py",
        "strategies/single_device.py",
        "callbacks/bridge.py",
        "checkpoint/lightning_format.py",
    ],
)
def test_no_other_file_that_knows_lightning_touches_a_protected_name_of_it(file: str) -> None:
    # The Trainer's own protected methods are overridable in transformers too, so the module calls them by name.
    own = {name for name in dir(littrainer.Trainer) if name.startswith("_")} | {"_model_is_prepared"}
    assert protected_names_in(PACKAGE / file) - own == set()
