"""The health of a training: losses, gradients and weights that are not finite, spikes, windows without labels.

Losses and gradient norms are kept on their device and read in one go, when a log or a save comes, so that nothing waits
between two logs. `on_nonfinite="skip"` and `"rollback"` read the norm at each optimizer step, before weights change.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from littrainer.checkpoint.layout import TRAINER_STATE_NAME
from littrainer.checkpoint.retention import get_newest_finite, sort_checkpoints
from littrainer.checkpoint.verification import find_last_intact
from littrainer.checkpoint.weights import find_nonfinite_weights
from littrainer.data.resume.rng import get_rng_states, set_rng_states
from littrainer.data.windows import IGNORED_LABEL
from littrainer.distributed.collectives import all_gather_object, any_rank, broadcast_object, get_rank, get_world_size
from littrainer.loop.loss import HostValues, RunningLoss, mean_over_processes
from littrainer.loop.preemption import resume_command
from littrainer.loop.step_policy import StepPolicy
from littrainer.model.traversal import copy_buffers, restore_buffers
from littrainer.runtime.notes import listed
from littrainer.runtime.weak_attributes import weak_property

if TYPE_CHECKING:
    from littrainer.data.windows import WindowLoader

logger = logging.getLogger(__name__)

# Gradient norms whose median a spike is compared with, and how many are needed before any norm counts as a spike.
MAX_NORMS, MIN_NORMS = 100, 20
# Batches left out at the same optimizer step, after which the training ends.
MAX_LEFT_OUT = 10
# Numbers that wait to be read; more are read without a log, since each takes half a kilobyte on a GPU.
MAX_UNREAD = 16_384
LABELS, LOSS, NORM = "labels", "loss", "norm"
# `Fault.first` of a spike, where everything is finite.
SPIKE = "nothing"


class Fault(NamedTuple):
    """What is known of an optimizer step whose numbers are not healthy.

    Parameters:
        step, epoch, micro_batch: of the window the optimizer step, counted from 1, and of its first micro-batch the
            epoch and the number there, from 0.
        loss: the first one of a micro-batch that is not finite, else the sum of all.
        rows: indices in the dataset of the rows it came up with.
        first: what was not finite first.
        text: all of this in words.
    """

    step: int
    epoch: int
    micro_batch: int
    loss: float | None
    grad_norm: float | None
    rows: list[int] | None
    first: str
    text: str


class UnhealthyTrainingError(RuntimeError):
    """Ends a training whose numbers are not finite, or whose gradients are much larger than usual.

    Parameters:
        message: what came up, what is done, and how to resume.
        fault: gives the attributes `step` (counted from 1), `loss`, `grad_norm` and `rows` (indices in the dataset).
        checkpoint: the last healthy checkpoint; None if there is none.
    """

    def __init__(self, message: str, fault: Fault, checkpoint: Path | None):
        super().__init__(message)
        self.step, self.loss, self.grad_norm, self.rows = fault.step, fault.loss, fault.grad_norm, fault.rows
        self._fault, self.checkpoint = fault, checkpoint

    def __reduce__(self) -> Any:
        return type(self), (str(self), self._fault, self.checkpoint)


class RollbackRequested(Exception):
    """Ends Lightning's loop, to continue from the last healthy checkpoint; its argument is the fault."""


class _Reading(NamedTuple):
    kind: str
    step: int
    epoch: int
    micro_batch: int
    value: float
    # Of a gradient norm that is a spike: the median that it was compared with.
    usual: float | None = None

    @property
    def is_bad(self) -> bool:
        return self.usual is not None or not math.isfinite(self.value)

    @property
    def is_bad_loss(self) -> bool:
        return self.kind == LOSS and not math.isfinite(self.value)


class HealthGuard(StepPolicy):
    """Reads the numbers of a training, and warns or ends it, as `on_nonfinite` and `spike_factor` say.

    Parameters:
        policy, spike_factor: `on_nonfinite` and `spike_factor` of the arguments.

    Attributes:
        left_out: windows that are not trained on, each as its epoch and the number of its first micro-batch.
        recent_norms: the last norms that are finite.
        rollback_counts: how often the training has gone back, by the optimizer step at which it did.
        losses: by optimizer step, the sum of the losses when its checkpoint was saved.
        unread: losses, norms and numbers of labels that wait to be read: kind, place, tensor or number.
        values: numbers of the device that were read together.
    """

    _windows = weak_property("_windows_reference")

    def __init__(self, policy: str = "warn", spike_factor: float | None = None):
        self.policy, self.spike_factor = policy, spike_factor
        self.left_out: list[tuple[int, int]] = []
        self.recent_norms: deque[float] = deque(maxlen=MAX_NORMS)
        self.unread: list[tuple[str, tuple[int, int, int], Any]] = []
        self.values = HostValues()
        self.rollback_counts: Counter[int] = Counter()
        self.losses: dict[int, float] = {}
        self._accepted: deque[_Reading] = deque(maxlen=MAX_UNREAD)
        self._has_loss_scaling = self._has_warned = self._has_warned_of_labels = False
        # Optimizer steps whose labels were counted, and those of them without any.
        self._labelled_steps = self._unlabelled_steps = 0
        # Checkpoints of earlier trainings in the same folder.
        self._of_others: Any = None

    def begin(self, windows: WindowLoader, model: Any, accelerator: Any, run_dir: str, checkpoint: Path | None) -> None:
        """A training begins, or continues from a checkpoint."""
        self._windows, self._model, self._run_dir = windows, model, run_dir
        self._resumed_from = [] if checkpoint is None else [str(checkpoint)]
        # The scaler skips steps whose gradients overflow, which belongs to finding the scale.
        self._has_loss_scaling = accelerator.scaler is not None
        self.unread, self._has_warned = [], False
        self._accepted.clear()
        if self._of_others is None:
            resumed = {} if checkpoint is None else _checkpoints_in(checkpoint.parent)
            self._of_others = {*_checkpoints_in(run_dir).values()} - {resumed.get(str(checkpoint))}

    def resume(self, record: Mapping[str, Any], is_same_data: bool) -> None:
        """Take over what a checkpoint's resume record has of the guard; positions only if they mean the same data."""
        positions = map(tuple, record.get("left_out", ()) if is_same_data else ())
        self.left_out += [position for position in positions if position not in self.left_out]
        self.recent_norms = deque(record.get("recent_norms", ()), MAX_NORMS)

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the guard."""
        kept = {"left_out": [*map(list, self.left_out)], "recent_norms": [*self.recent_norms]}
        return {name: value for name, value in kept.items() if value}

    def note_losses(self, step: int, loss: RunningLoss) -> None:
        """Note the sum of the losses for a rollback to the checkpoint that is saved next."""
        self.losses[step] = loss.before_last_log + mean_over_processes(loss.since_last_log)

    def look(self, comes_save: bool = False, is_end: bool = False) -> None:
        """Read what has come since the last look, and report what is not finite; called at logs, saves and the end.

        Weights are looked at too if nothing follows that would show it: at the end, and before a save under "stop".

        Raises:
            UnhealthyTrainingError: a number is not finite, and `on_nonfinite` is "stop".
        """
        readings = [*self._accepted, *self._read()]
        self._accepted.clear()
        if self._unlabelled_steps and not self._has_warned_of_labels:
            self._has_warned_of_labels = True
            self._warn(
                f"{self._unlabelled_steps} of {self._labelled_steps} optimizer steps so far "
                f"({self._unlabelled_steps / self._labelled_steps:.1%}) have no label that counts: all are "
                f"{IGNORED_LABEL}. Their loss is divided by 0. Leave such samples out of the data, or cut them off "
                "less early."
            )
        stops = self.policy == "stop"
        looks_at_weights = is_end or (comes_save and stops)
        are_finite = all(map(math.isfinite, [reading.value for reading in readings]))
        has_bad = not are_finite or {reading.usual for reading in readings} - {None}
        if not (stops or looks_at_weights or has_bad):
            self._has_warned = False
            return
        norms = [reading for reading in readings if reading.kind == NORM]
        bad = [norm for norm in norms if norm.is_bad]
        # Norms are the same in all processes, losses are not.
        is_common = bool(bad) or stops
        if self._has_loss_scaling and not MIN_NORMS <= len(bad) == len(norms):
            bad = [norm for norm in bad if math.isfinite(norm.value)]
        steps = [norm.step for norm in bad] + [reading.step for reading in readings if reading.is_bad_loss]
        own = self._fault([reading for reading in readings if reading.step == min(steps)]) if steps else None
        fault = _first(all_gather_object(own)) if is_common else own
        is_of_weights = fault is None and looks_at_weights and not self._has_warned
        if is_of_weights:
            fault = self._fault_of_weights(readings)
            # Under "stop" all processes are here; else a process that has warned of its losses is not.
            fault = _first(all_gather_object(fault)) if stops else fault
        if fault is None:
            self._has_warned = False
        elif stops:
            raise self._error(fault, "on_nonfinite='stop' ends the training before anything of it is saved.")
        elif not self._has_warned:
            # The weights may be damaged, and then each interval that follows is like this one.
            self._has_warned = fault.first != SPIKE
            self._warn(f"{fault.text} {self._where_to_go_on()}", everywhere=not (is_common or is_of_weights))

    def _read(self) -> list[_Reading]:
        unread, self.unread = [number for number in self.unread if number[2] is not None], []
        if not unread:
            return []
        values = self.values.items([value for _, _, value in unread])
        readings = [_Reading(kind, *place, value) for (kind, place, _), value in zip(unread, values, strict=True)]
        labels = [reading.value for reading in readings if reading.kind == LABELS]
        self._labelled_steps += len(labels)
        self._unlabelled_steps += labels.count(0)
        return readings if self.spike_factor is None else [self._compared(reading) for reading in readings]

    def _compared(self, reading: _Reading) -> _Reading:
        """Return a gradient norm with the median that it exceeds, if it is a spike; called once for each norm."""
        if self.spike_factor is None or reading.kind != NORM or not math.isfinite(reading.value):
            return reading
        usual = statistics.median(self.recent_norms) if len(self.recent_norms) >= MIN_NORMS else math.inf
        # Spikes too: if gradients stay as large, they are the usual ones after a while.
        self.recent_norms.append(reading.value)
        return reading._replace(usual=usual) if reading.value > self.spike_factor * usual else reading

    def _warn(self, text: str, everywhere: bool = False) -> None:
        if everywhere or get_rank() == 0:
            logger.warning(text)

    def _fault(self, of_step: list[_Reading], weights_are_as_then: bool = False) -> Fault:
        """Return which of an optimizer step's numbers was not finite first, and the rows of the dataset involved."""
        norm = next((one for one in of_step if one.kind == NORM), None)
        losses = {one.micro_batch: one.value for one in of_step if one.kind == LOSS}
        bad = [one.micro_batch for one in of_step if one.is_bad_loss]
        micro_batches = bad[:1] or list(losses)
        loss = losses[bad[0]] if bad else sum(losses.values()) if losses else None
        _, step, epoch, micro_batch, *_ = of_step[0]
        found = [self._windows.find_rows(epoch, one) for one in micro_batches]
        rows = None if None in found else [row for one in found if one is not None for row in one]
        bad_weights = listed(find_nonfinite_weights(self._model))
        if norm is not None and norm.usual is not None and not bad:
            first = SPIKE
            words = f"the gradient norm is {norm.value:.4g}, above spike_factor={self.spike_factor:g} times the median "
            words += f"of those before, {norm.usual:.4g}."
        else:
            first = self._first_in_data(of_step, rows)
            if not first and weights_are_as_then and bad_weights:
                first = f"the weights ({bad_weights})"
            # nan weights do not heal.
            of_loss = ("the loss", "the data" * (rows is None), "the weights" * bool(bad_weights))
            first = first or (" or ".join(filter(None, of_loss)) if bad else "the gradients")
            of_norm = "" if norm is None else f" and the gradient norm {norm.value:.4g}"
            words = f"the loss is {math.nan if loss is None else loss:.4g}{of_norm}. Not finite first: {first}."
        if rows is not None:
            words += f" The rows of {'this batch' if bad else 'its batches'} are {listed(rows)} of the train_dataset."
        elif micro_batches:
            words += f" It is micro-batch {micro_batches[0] + 1} of epoch {epoch + 1}."
        if get_world_size() > 1 and bad:
            words += f" Process {get_rank()} has it."
        if bad_weights and not weights_are_as_then:
            words += f" By now these weights are not finite: {bad_weights}."
        return Fault(
            step, epoch, micro_batch, loss, norm and norm.value, rows, first, f"Optimizer step {step}: {words}"
        )

    def _fault_of_weights(self, known: list[_Reading]) -> Fault | None:
        step, bad_weights = known[-1].step if known else 0, listed(find_nonfinite_weights(self._model))
        words = f"After optimizer step {step} these weights are not finite: {bad_weights}."
        return Fault(step, 0, 0, None, None, None, f"the weights ({bad_weights})", words) if bad_weights else None

    def _first_in_data(self, of_step: list[_Reading], rows: list[int] | None) -> str:
        if any(one.kind == LABELS and one.value == 0 for one in of_step):
            return f"the number of labels, which is 0 (all are {IGNORED_LABEL})"
        states = get_rng_states(gpu=False)
        try:
            dataset = getattr(self._windows.loader, "dataset", None)
            samples = {row: dataset[row] for row in rows or ()}  # type: ignore[index]
        except Exception:
            # A dataset that can be read in its workers only.
            return ""
        finally:
            set_rng_states(states)
        for row, sample in samples.items():
            parts = sample if isinstance(sample, Mapping) else {"it": sample}
            if sick := [str(name) for name, value in parts.items() if _has_non_finite(value)]:
                return f"the data, row {row} in {listed(sick)}"
        return ""

    def _where_to_go_on(self) -> str:
        healthy = self.healthy_checkpoint()
        if healthy is None:
            return "There is no healthy checkpoint."
        without = "" if self.policy == "rollback" else ' (set on_nonfinite="rollback" to leave this batch out)'
        return f"The last healthy checkpoint is {healthy}. To resume{without}: {resume_command(str(healthy))}"

    def _error(self, fault: Fault, what_is_done: str) -> UnhealthyTrainingError:
        text = f"{fault.text} {what_is_done} {self._where_to_go_on()}"
        return UnhealthyTrainingError(text, fault, self.healthy_checkpoint())

    def healthy_checkpoint(self) -> Path | None:
        """Return the newest checkpoint of this training whose weights are not known to be non-finite, or None."""
        own = [path for path, mark in _checkpoints_in(self._run_dir).items() if mark not in self._of_others]
        newest = get_newest_finite([*self._resumed_from, *own])
        return None if newest is None else Path(newest)


class SkippingHealthGuard(HealthGuard):
    """A guard that reads the norm at each optimizer step, before weights change, and leaves out a step that is bad."""

    def on_window_begin(self) -> None:
        """Copy the buffers that forward passes change."""
        self._buffers = copy_buffers(self._model)

    def should_skip_step(self) -> bool:
        """Return whether the optimizer step is left out, by its losses and the norm of its gradients.

        Raises:
            RollbackRequested: the training goes back to its last healthy checkpoint.
            UnhealthyTrainingError: the weights are not finite, so that leaving out steps does not help.
        """
        readings = self._read()
        norm = readings[-1]
        # Losses are those of this process.
        has_bad_loss = any_rank(any(reading.is_bad_loss for reading in readings))
        is_left_to_scaling = self._has_loss_scaling and not math.isfinite(norm.value)
        if not has_bad_loss and (not norm.is_bad or is_left_to_scaling):
            self._accepted += readings
            return False
        restore_buffers(self._buffers)
        fault = _first(all_gather_object(self._fault(readings, weights_are_as_then=True)))
        if self.policy == "rollback":
            raise RollbackRequested(fault)
        if fault.first.startswith("the weights"):
            raise self._error(fault, "Leaving out steps does not help then, so the training ends.")
        self._warn(f"on_nonfinite='skip' leaves out this optimizer step. {fault.text}")
        return True

    def prepare_rollback(self, fault: Fault, steps_left: int) -> str:
        """Leave the window of a fault out from now on, and return the folder of the checkpoint to continue from.

        Raises:
            UnhealthyTrainingError: there is none, no step is left, or a rollback there does not help.
        """
        others = [Path(path).name for path, mark in _checkpoints_in(self._run_dir).items() if mark in self._of_others]
        found = None if get_rank() else find_last_intact(self._run_dir, others) or get_newest_finite(self._resumed_from)
        folder = broadcast_object(found)
        if folder is None:
            raise self._error(fault, "on_nonfinite='rollback' has nowhere to go back to.")
        if steps_left <= 0:
            raise self._error(fault, "on_nonfinite='rollback' has left out all other batches, so nothing is trained.")
        self.rollback_counts[fault.step] += 1
        if self.rollback_counts[fault.step] > MAX_LEFT_OUT:
            raise self._error(fault, f"{MAX_LEFT_OUT} batches have been left out at this step, which is no progress.")
        self.left_out.append((fault.epoch, fault.micro_batch))
        self._warn(
            f"{fault.text} on_nonfinite='rollback' goes back to {folder} and leaves this optimizer step's rows out."
        )
        return str(folder)


def _first(faults: list[Fault | None]) -> Any:
    found = [one for one in faults if one is not None]
    # Of the processes with a loss that is not finite the first one.
    return min(found, key=lambda one: (one.step, math.isfinite(one.loss or 0)), default=None)


def _has_non_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_non_finite, value.values()))
    with suppress(TypeError, ValueError, RuntimeError):
        tensor = torch.as_tensor(value)
        return tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
    return isinstance(value, (list, tuple)) and any(map(_has_non_finite, value))


def _checkpoints_in(run_dir: str | Path) -> dict[str, tuple[str, int]]:
    # By path, in the order of their steps, what tells them from others that may have stood there.
    states = [Path(path, TRAINER_STATE_NAME) for path in sort_checkpoints(run_dir)]
    return {str(state.parent): (state.parent.name, state.stat().st_mtime_ns) for state in states if state.is_file()}
