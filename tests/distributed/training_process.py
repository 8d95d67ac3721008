"""One of several processes that train together: `python -m tests.distributed.training_process FOLDER NAME ...`.

Rank and world size come from the environment, as a launcher sets them. Each process writes what the named checks found
to `FOLDER/RANK.pickle`.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from littrainer import Trainer, TrainerCallback
from littrainer.checkpoint import writer
from littrainer.checkpoint.weights import write_weights
from littrainer.training import batch_size_search
from tests.scenarios.models import PartlyTrainedClassifier, VectorClassifier
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

RANK, PROCESSES = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
KINDS: dict[str, type[Trainer]] = {"automatic": Trainer, "manual": StepwiseTrainer}
# The optimizer step whose checkpoint is written while the next one is taken.
SAVED_STEP = 3
# What torch exchanges between processes by itself, outside of the backward pass.
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "barrier")

Check = Callable[[Path], Any]


class NotesCollectives(TrainerCallback):
    """Notes what is exchanged between the processes from the beginning of each optimizer step to its end."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.of_steps: list[list[str]] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        originals = {name: getattr(dist, name) for name in COLLECTIVES}
        try:
            for name, original in originals.items():
                setattr(dist, name, self._noted(name, original))
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)

    def _noted(self, name: str, original: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            self.names.append(f"{name} in the background" if kwargs.get("async_op") else name)
            return original(*args, **kwargs)

        return note

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            self.of_steps.append(self.names)
        self.names = []


class WritesUntilStep(TrainerCallback):
    """Holds what writes in the background until the end of an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_reached = threading.Event()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.is_reached.set()

    def write(self, *args: Any, **kwargs: Any) -> None:
        assert self.is_reached.wait(LONGEST_WAIT_SECONDS)
        write_weights(*args, **kwargs)


def collectives_of_a_step(folder: Path) -> Any:
    """What is exchanged beside gradients from one optimizer step to the next."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "finding a size": {"auto_find_batch_size": True},
        "writing": {"async_save": True, "save_strategy": "steps", "save_steps": SAVED_STEP},
    }
    found: dict[str, Any] = {}
    for mode, kind in KINDS.items():
        for way, changes in ways.items():
            notes, writes = NotesCollectives(), WritesUntilStep(SAVED_STEP + 1)
            given = {"callbacks": [notes, writes]}
            trainer = quiet_trainer(
                folder, kind=kind, rows=96, given=given, gradient_accumulation_steps=2, max_steps=5, **changes
            )
            with (
                notes.noting(),
                mock.patch.object(writer, "write_weights", writes.write),
                mock.patch.object(batch_size_search, "STEPS_AGREED_ON", 1),
            ):
                trainer.train()
            found[f"{mode} {way}"] = notes.of_steps
    return found


def unused_parameters(folder: Path) -> Any:
    """What is said of parameters without gradients that nobody looks for."""
    try:
        quiet_trainer(folder, PartlyTrainedClassifier(), max_steps=3, ddp_find_unused_parameters=False).train()
    except RuntimeError as failure:
        return [str(failure), *getattr(failure, "__notes__", [])]
    return []


def strategy_of_the_users(folder: Path) -> Any:
    """A strategy that is handed over for several trainings, with a hook that counts exchanges of gradients."""
    calls: list[int] = []

    def exchange(bucket: Any) -> Any:
        calls.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)

    strategy = DDPStrategy(ddp_comm_hook=lambda _, bucket: exchange(bucket), broadcast_buffers=False)
    each_batch = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    found: dict[str, Any] = {}
    for mode, kind in KINDS.items():
        for way, changes in (("at the last", {}), ("at each", each_batch)):
            calls.clear()
            given = {"lightning": {"strategy": strategy}}
            accumulated: Any = {"rows": 64, "gradient_accumulation_steps": 3, "max_steps": 2, **changes}
            trainer = quiet_trainer(folder, kind=kind, given=given, **accumulated)
            trainer.train()
            used: Any = trainer.lightning_trainer.strategy  # type: ignore[union-attr]
            found[f"{mode} {way}"] = {
                "buckets": len(calls),
                "broadcasts buffers": trainer.model_wrapped.broadcast_buffers,
                "ranks": (used.global_rank, used.world_size),
            }
    return found


class Raises(TrainerCallback):
    """Raises a flag of the control at one event, on some ranks."""

    def __init__(self, flag: str, event: str, step: int, ranks: tuple[int, ...]):
        self.seen: list[tuple[str, int]] = []

        def on_event(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step and RANK in ranks:
                setattr(control, flag, True)

        setattr(self, event, on_event)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("save", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("evaluate", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("end", state.global_step))


def flags(folder: Path) -> Any:
    """What happens when one process, or each of them, raises a flag."""

    def seen(flag: str, event: str, ranks: tuple[int, ...], **changes: Any) -> list[tuple[str, int]]:
        callback = Raises(flag, event, 2, ranks)
        trainer = quiet_trainer(folder, rows=80, given={"callbacks": [callback]}, **{"max_steps": 6, **changes})
        trainer.train()
        return callback.seen

    everybody = tuple(range(PROCESSES))
    stop, later = "should_training_stop", {"num_train_epochs": 1, "max_steps": -1}
    return {
        "stop, all": seen(stop, "on_step_end", everybody),
        "stop, one": seen(stop, "on_step_end", (1,)),
        "stop when logging, one": seen(stop, "on_log", (1,), logging_strategy="steps", logging_steps=1),
        "stop within a window, one": seen(stop, "on_substep_end", (1,), gradient_accumulation_steps=2),
        "end of epoch, one": seen("should_epoch_stop", "on_step_end", (1,), **later),
        "evaluate, all": seen("should_evaluate", "on_step_end", everybody),
        "evaluate, one": seen("should_evaluate", "on_step_end", (1,)),
    }


def lightning_callbacks(folder: Path) -> Any:
    """Lightning's own callbacks, and one that stops in one process only."""
    from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging

    class StopsAlone(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if RANK == 1 and trainer.global_step == 2:
                trainer.should_stop = True

    def steps(*callbacks: Any, **changes: Any) -> Any:
        trainer = quiet_trainer(
            folder,
            rows=40,
            given={"callbacks": list(callbacks)},
            **{"max_steps": 6, "eval_strategy": "steps", "eval_steps": 1, **changes},
        )
        trainer.train()
        weights = torch.cat([one.detach().flatten() for one in trainer.model.parameters()])
        return trainer.state.global_step, weights.tolist()

    stopping = EarlyStopping("eval_loss", mode="max", patience=1)
    return {
        "alone": steps(StopsAlone()),
        "early": steps(stopping),
        "averaging": steps(StochasticWeightAveraging(0.01, swa_epoch_start=1), max_steps=-1, num_train_epochs=3),
    }


def refusals(folder: Path) -> Any:
    """A model that DDP cannot train."""
    spread: Any = VectorClassifier()
    spread.hf_device_map = {"inner": "cpu", "head": "disk"}
    try:
        quiet_trainer(folder, spread, max_steps=1).train()
    except ValueError as failure:
        return str(failure)
    return ""


class Unfreezes(TrainerCallback):
    """Lets the first layer be trained from the second epoch on."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].inner.requires_grad_(state.global_step > 0)


def unfrozen_parameters(folder: Path) -> Any:
    """Weights of a layer that a callback unfreezes, and what it was before."""
    found = {}
    for mode, kind in KINDS.items():
        torch.manual_seed(0)
        model = VectorClassifier()
        model.inner.requires_grad_(False)
        before = model.inner.weight.flatten().tolist()
        trainer = quiet_trainer(
            folder, model, kind=kind, given={"callbacks": [Unfreezes()]}, num_train_epochs=2, optim="sgd"
        )
        trainer.create_optimizer()
        trainer.optimizer.add_param_group({"params": list(model.inner.parameters())})
        trainer.train()
        found[mode] = (before, model.inner.weight.flatten().tolist())
    return found


class NeedsMemory(VectorClassifier):
    """Runs out of memory in one process with more than two samples at a time."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if RANK == 1 and len(x) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(x, labels)


def memory(folder: Path) -> Any:
    """The sizes of micro-batches that are found where memory runs out in one process only."""
    found = {}
    for mode, kind in KINDS.items():
        torch.manual_seed(0)
        trainer = quiet_trainer(
            folder, NeedsMemory(), kind=kind, rows=24, auto_find_batch_size=True, max_steps=3, ddp_timeout=60
        )
        trainer.train()
        weights = torch.cat([one.detach().flatten() for one in trainer.model.parameters()])
        found[mode] = (trainer._train_batch_size, trainer.state.global_step, weights.tolist())
    return found


def trial_steps(folder: Path) -> Any:
    """What finders find, what is left of them, and how much of the data limits leave of a training."""
    found = {}
    for mode, kind in KINDS.items():
        torch.manual_seed(0)
        trainer = quiet_trainer(
            folder,
            NeedsMemory(),
            kind=kind,
            rows=40,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            lightning={"limit_train_batches": 3, "limit_val_batches": 1},
            num_train_epochs=1,
            ddp_timeout=60,
        )
        before = [one.detach().clone() for one in trainer.model.parameters()]
        curve = trainer.lr_find(num_training=6).results
        size = trainer.scale_batch_size(steps_per_trial=1)
        is_unchanged = all(map(torch.equal, before, trainer.model.parameters()))
        steps = trainer.train().global_step
        samples = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation").num_samples
        found[mode] = {"curve": curve, "size": size, "is_unchanged": is_unchanged, "steps": steps, "samples": samples}
    return found


CHECKS: tuple[Check, ...] = (
    collectives_of_a_step,
    unused_parameters,
    strategy_of_the_users,
    flags,
    lightning_callbacks,
    refusals,
    memory,
    trial_steps,
    unfrozen_parameters,
)


def main(folder: Path, wanted: list[str]) -> None:
    torch.set_num_threads(1)
    found = {}
    for check in CHECKS:
        if not wanted or check.__name__ in wanted:
            found[check.__name__] = check(folder / "runs")
    (folder / f"{RANK}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
