"""Lightning's own loop and the fast one do the same, as far as anybody can hear."""

from __future__ import annotations

import ast
import copy
import hashlib
import inspect
import multiprocessing
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import Profiler

import littrainer
from littrainer import Trainer, TrainerCallback
from littrainer.engine import fast_training_loop, lightning_trainer
from littrainer.engine.fast_training_loop import HOOKS, KNOWN_RELEASES, FastEpochLoop
from tests.engine.test_lightning_internals import protected_names_in
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

ADVICE = (
    f"Lightning {pl.__version__} is no release that fast_training_loop.py was written for: trainings take Lightning's "
    "own, slower loop. Compare what differs, change it, then add the release to KNOWN_RELEASES and its digests here."
)

CONNECTOR = "pytorch.trainer.connectors.logger_connector.logger_connector"
# What else Lightning's source was in releases of 2.5: they differ by a hook of the module that ends an epoch by
# returning -1, which TrainerModule has not, by a flag for resuming, and by DDP with a static graph around a module.
REPLACED_IN_2_5: dict[str, tuple[str, ...]] = {
    "pytorch.loops.loop:_Loop.on_iteration_done": ("8e07374134ed",),
    "pytorch.loops.training_epoch_loop:_TrainingEpochLoop.advance": ("58c791f79d73", "e37ae86450b0"),
    "pytorch.loops.training_epoch_loop:_TrainingEpochLoop.on_run_start": ("c4508f1462ad",),
    "pytorch.strategies.ddp:DDPStrategy.post_backward": ("e3c4a9644590",),
}
# What the fast loop does in its own words, with the digest of Lightning's source.
REPLACED: dict[str, str] = {
    "fabric.plugins.precision.precision:Precision.convert_input": "c323ad3616fd",
    "pytorch.core.module:LightningModule.backward": "5eaa40852c22",
    "pytorch.core.module:LightningModule.optimizer_step": "05c6dd5adce7",
    "pytorch.core.module:LightningModule._apply_batch_transfer_handler": "168f5bf65759",
    "pytorch.core.optimizer:LightningOptimizer.step": "d9ce660f8e79",
    "pytorch.loops.fetchers:_DataFetcher.__next__": "e40395a802bc",
    "pytorch.loops.fetchers:_PrefetchDataFetcher.__next__": "b197e030618b",
    "pytorch.loops.loop:_Loop.on_iteration_done": "14e250439c8b",
    "pytorch.loops.optimization.automatic:Closure.closure": "b0f3e4cf86a9",
    "pytorch.loops.optimization.automatic:ClosureResult.from_training_step_output": "22d1f086aee9",
    "pytorch.loops.optimization.automatic:_AutomaticOptimization._make_zero_grad_fn": "029892007548",
    "pytorch.loops.optimization.automatic:_AutomaticOptimization._on_before_zero_grad": "5ed55974a617",
    "pytorch.loops.optimization.automatic:_AutomaticOptimization._optimizer_step": "88db4ea67cd2",
    "pytorch.loops.optimization.automatic:_AutomaticOptimization._optimizer_zero_grad": "e735b375562c",
    "pytorch.loops.optimization.automatic:_AutomaticOptimization._training_step": "9e2d61d136ca",
    "pytorch.loops.optimization.automatic:_AutomaticOptimization.run": "35716a14943f",
    "pytorch.loops.training_epoch_loop:_TrainingEpochLoop._should_accumulate": "1eb44692b8d6",
    "pytorch.loops.training_epoch_loop:_TrainingEpochLoop._num_ready_batches_reached": "e7071a6ce7f5",
    "pytorch.loops.training_epoch_loop:_TrainingEpochLoop._update_learning_rates": "22126bb89bbf",
    "pytorch.loops.training_epoch_loop:_TrainingEpochLoop.advance": "c211a8bb84d5",
    "pytorch.loops.training_epoch_loop:_TrainingEpochLoop.done": "ef34c49371b8",
    "pytorch.loops.training_epoch_loop:_TrainingEpochLoop.on_advance_end": "8edd3ae96599",
    "pytorch.loops.training_epoch_loop:_TrainingEpochLoop.on_run_start": "768d85147568",
    "pytorch.loops.training_epoch_loop:_TrainingEpochLoop.run": "9ff091c84cd7",
    "pytorch.plugins.precision.amp:MixedPrecision.optimizer_step": "66fbaea7a0d3",
    "pytorch.plugins.precision.amp:MixedPrecision.pre_backward": "5e33ffea4117",
    "pytorch.plugins.precision.precision:Precision._after_closure": "45c5ac93ea82",
    "pytorch.plugins.precision.precision:Precision._clip_gradients": "6cc3d4a24f22",
    "pytorch.plugins.precision.precision:Precision._wrap_closure": "a0f9d6630ac9",
    "pytorch.plugins.precision.precision:Precision.backward": "68200e19e697",
    "pytorch.plugins.precision.precision:Precision.optimizer_step": "491c0da876cd",
    "pytorch.plugins.precision.precision:Precision.post_backward": "e005f6ed0645",
    "pytorch.plugins.precision.precision:Precision.pre_backward": "9ca3ca94bbf9",
    "pytorch.plugins.precision.precision:Precision.train_step_context": "811619a68a7f",
    "pytorch.strategies.ddp:DDPStrategy.optimizer_step": "5cf5b760be11",
    "pytorch.strategies.ddp:DDPStrategy.post_backward": "a43189cd4035",
    "pytorch.strategies.ddp:DDPStrategy.pre_backward": "340346c738cb",
    "pytorch.strategies.strategy:Strategy.backward": "d7527ce3472c",
    "pytorch.strategies.strategy:Strategy.batch_to_device": "630d8415a6e1",
    "pytorch.strategies.strategy:Strategy.on_train_batch_start": "d3c00e966af8",
    "pytorch.strategies.strategy:Strategy.optimizer_step": "9e519dae2a7a",
    "pytorch.strategies.strategy:Strategy.post_training_step": "487a228b4c37",
    "pytorch.strategies.strategy:Strategy.training_step": "b585ea076110",
    "pytorch.trainer.call:_call_callback_hooks": "db53c7410f78",
    "pytorch.trainer.call:_call_lightning_module_hook": "160281faa0f9",
    "pytorch.trainer.call:_call_strategy_hook": "ecbeca072455",
    f"{CONNECTOR}:_LoggerConnector.on_batch_end": "910e37278afb",
    f"{CONNECTOR}:_LoggerConnector.on_batch_start": "b86eeef7d7e3",
    f"{CONNECTOR}:_LoggerConnector.update_train_step_metrics": "60aefb4bedf9",
    "pytorch.utilities.combined_loader:CombinedLoader.__next__": "f3da7576dafb",
    "pytorch.utilities.combined_loader:_MaxSizeCycle.__next__": "b8bfd20ef75f",
}
BOTH_MODES = pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer], ids=["automatic", "manual"])


def digest(function: Any) -> str:
    """Of a function's lines, whatever its comments and its docstring say."""
    lines, _ = inspect.getsourcelines(function)
    tree: Any = ast.parse(textwrap.dedent("".join(lines)))
    first = tree.body[0].body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        del lines[first.lineno - 1 : first.end_lineno]
    code = [line.split("  #")[0].strip() for line in lines]
    return hashlib.sha256("\n".join(line for line in code if line and line[0] != "#").encode()).hexdigest()[:12]


def replaced_function(name: str) -> Any:
    module_name, _, path = name.partition(":")
    found: Any = __import__(f"lightning.{module_name}", fromlist=["_"])
    for part in path.split("."):
        found = getattr(found, part)
    return inspect.unwrap(found.fget if isinstance(found, property) else found)


def test_this_release_of_lightning_is_one_that_the_fast_loop_was_written_for() -> None:
    assert pl.__version__ in KNOWN_RELEASES, ADVICE


@pytest.mark.parametrize("name", REPLACED)
def test_what_the_fast_loop_replaces_is_what_it_was_when_it_was_written(name: str) -> None:
    earlier = REPLACED_IN_2_5.get(name, ()) if pl.__version__.startswith("2.5.") else ()
    assert digest(replaced_function(name)) in {REPLACED[name], *earlier}, f"{name}: {ADVICE}"


def test_every_protected_name_of_lightning_in_that_file_is_known_here() -> None:
    package = Path(littrainer.__file__).parent
    assert protected_names_in(package / "engine" / "fast_training_loop.py") == {
        "_MaxSizeCycle",
        "_PrefetchDataFetcher",
        "_TrainingEpochLoop",
        "_first_loop_iter",
        "_iterator",
        "_logger_connector",
    }


def test_another_release_of_lightning_keeps_its_own_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fast_training_loop, "KNOWN_RELEASES", frozenset({"1.0"}))
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.train()
    assert type(trainer.lightning_trainer.fit_loop.epoch_loop) is _TrainingEpochLoop


class Listening(pl.Callback):
    """Notes each hook, and what a callback can see of the training in it; logs in each of them."""

    def __init__(self, hooks: tuple[str, ...] = HOOKS) -> None:
        self.heard: list[Any] = []
        for hook in hooks:
            setattr(self, hook, self._listener(hook))

    def _listener(self, hook: str) -> Callable[..., None]:
        def listen(trainer: Any, module: Any, *args: Any) -> None:
            module.log(f"seen_{hook}", float(len(self.heard)), on_step=True, on_epoch=True, batch_size=1)
            loops = trainer.fit_loop.epoch_loop.state_dict()
            gradients = [None if one.grad is None else one.grad.clone() for one in module.model.parameters()]
            self.heard.append((hook, trainer.global_step, plain(args), loops, gradients, module._current_fx_name))

        return listen


def plain(value: Any) -> Any:
    """Something that two runs can be compared by."""
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


class Metrics(pl.loggers.Logger):
    """Keeps what is logged to it."""

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
            patch.setattr(fast_training_loop, "KNOWN_RELEASES", frozenset())
        settings = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "logging_steps": 1, **arguments}
        given = {"train_dataset": Rows(vector_rows(14)), "callbacks": further}
        trainer = quiet_trainer(folder, kind=kind, given=given, **settings)
        trainer.train()
    assert (type(trainer.lightning_trainer.fit_loop.epoch_loop) is FastEpochLoop) is is_fast
    return trainer


@BOTH_MODES
@pytest.mark.parametrize("accumulation", [1, 3])
def test_callbacks_hear_and_see_the_same_in_both_loops(tmp_path: Path, kind: type[Trainer], accumulation: int) -> None:
    found = []
    for is_fast in (True, False):
        listening, metrics = Listening(), Metrics()
        trainer = run(
            tmp_path / str(is_fast),
            is_fast,
            kind,
            [listening],
            gradient_accumulation_steps=accumulation,
            lightning={"logger": metrics},
        )
        history = [
            {name: value for name, value in entry.items() if "runtime" not in name and "_per_" not in name}
            for entry in trainer.state.log_history
        ]
        weights = [one.tolist() for one in trainer.model.parameters()]
        heard = [plain(entry) for entry in listening.heard]
        logged = [
            (step, {name: value for name, value in entry.items() if "seen_" in name or name == "epoch"})
            for step, entry in metrics.logged
        ]
        found.append((heard, logged, weights, plain(history), trainer.lightning_trainer.global_step))
    fast, own = found
    assert len(fast[0]) == len(own[0]) > 14
    for one, other in zip(fast[0], own[0], strict=True):
        assert one == other
    assert fast[1:] == own[1:]


def test_hooks_that_no_callback_has_are_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for hook in HOOKS[1:-1]:
        monkeypatch.setattr(pl.Callback, hook, lambda *_, name=hook: called.append(name))
    listening = Listening(("on_after_backward",))
    run(tmp_path, True, Trainer, [listening])
    assert called == []
    assert [entry[0] for entry in listening.heard] == ["on_after_backward"] * 14


IN_BOTH_LOOPS = pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "Lightning's own"])


@IN_BOTH_LOOPS
def test_a_callback_that_comes_in_the_middle_of_an_epoch_is_heard(tmp_path: Path, is_fast: bool) -> None:
    late = Listening(("on_train_batch_start",))

    class Adding(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                trainer.callbacks.append(late)

    run(tmp_path, is_fast, Trainer, [Adding()], num_train_epochs=1)
    # In the micro-batch in which it comes too, since it stands behind the one that has added it.
    assert [entry[1] for entry in late.heard] == [3, 4, 5, 6]


def test_a_hook_that_a_callback_gets_in_the_middle_of_an_epoch_is_called(tmp_path: Path) -> None:
    class Waiting(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                self.on_after_backward = heard.append_batch  # type: ignore[method-assign]

    heard = Mock()
    trainer = run(tmp_path, True, Trainer, [Waiting()], num_train_epochs=1)
    assert heard.append_batch.call_count == trainer.state.global_step - 3 == 4


def test_a_hook_that_is_set_on_the_module_is_called(tmp_path: Path) -> None:
    class Setting(pl.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            module.on_before_optimizer_step = heard.step

    heard = Mock()
    trainer = run(tmp_path, True, Trainer, [Setting()])
    assert heard.step.call_count == trainer.state.global_step == 14


@BOTH_MODES
@pytest.mark.parametrize(
    "hook, expected",
    [("on_train_batch_start", 4), ("on_after_backward", 4), ("on_after_batch_transfer", 3)],
)
def test_a_hook_that_is_set_on_the_module_in_the_middle_of_an_epoch_is_called(
    tmp_path: Path, kind: type[Trainer], hook: str, expected: int
) -> None:
    """All else goes on as it would have done."""
    found = []
    for is_fast in (True, False):
        calls: list[str] = []

        class Setting(pl.Callback):
            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
                if batch_idx == 3 and trainer.current_epoch == 0:

                    def own(*args: Any) -> Any:
                        calls.append(hook)  # noqa: B023
                        return args[0] if args else None

                    setattr(module, hook, own)

            def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
                vars(module).pop(hook, None)

        listening = Listening()
        run(tmp_path / str(is_fast), is_fast, kind, [listening, Setting()], gradient_accumulation_steps=2)
        found.append((calls, [plain(entry) for entry in listening.heard]))
    fast, own = found
    assert fast == own
    assert len(fast[0]) == expected or kind is StepwiseTrainer


@IN_BOTH_LOOPS
def test_a_limit_of_steps_that_is_set_in_the_middle_of_an_epoch_ends_it(tmp_path: Path, is_fast: bool) -> None:
    class Limiting(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.fit_loop.epoch_loop.max_steps = 3

    assert run(tmp_path, is_fast, Trainer, [Limiting()]).state.global_step == 3


@pytest.mark.parametrize("error", [None, OverflowError, KeyboardInterrupt])
def test_no_worker_process_is_left_where_an_epoch_ends_in_its_middle(tmp_path: Path, error: Any) -> None:
    class Ending(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            during.extend(one for one in multiprocessing.active_children() if one not in before)
            if error is not None:
                raise error

    before, during = multiprocessing.active_children(), []
    given = {"train_dataset": Rows(vector_rows(64)), "callbacks": [Ending()]}
    trainer = quiet_trainer(tmp_path, given=given, max_steps=1, dataloader_num_workers=1)
    if error is None:
        trainer.train()
    else:
        with pytest.raises(error):
            trainer.train()
    assert len(during) == 1
    assert [one for one in multiprocessing.active_children() if one not in before] == []
    assert copy.deepcopy(trainer).state.global_step == 1


class Noting(Profiler):
    def __init__(self) -> None:
        super().__init__()
        self.actions: set[str] = set()

    def start(self, action_name: str) -> None:
        self.actions.add(action_name)

    def stop(self, action_name: str) -> None:
        pass


def test_a_profiler_is_told_of_all_that_lightning_does(tmp_path: Path) -> None:
    profiler = Noting()
    trainer = run(tmp_path, True, Trainer, [], lightning={"profiler": profiler})
    assert not trainer.lightning_trainer.fit_loop.epoch_loop._is_fast
    assert {"run_training_batch", "[LightningModule]TrainerModule.optimizer_step"} <= profiler.actions


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_lightning_callback_that_raises_stop_iteration_ends_the_epoch(tmp_path: Path, is_fast: bool) -> None:
    class Ending(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                raise StopIteration

    assert run(tmp_path, is_fast, Trainer, [Ending()]).state.global_step == 8


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_stop_iteration_of_the_script_is_an_error(tmp_path: Path, is_fast: bool) -> None:
    class Broken(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise StopIteration("in the loss")

    with pytest.raises(StopIteration, match="in the loss"):
        run(tmp_path, is_fast, Broken, [])


def test_evaluations_go_through_lightnings_own_loops(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path)
    assert type(lightning_trainer.build_lightning_trainer(trainer, run=None).fit_loop.epoch_loop) is _TrainingEpochLoop
