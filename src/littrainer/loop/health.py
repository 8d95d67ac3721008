"""The health guard: non-finite losses, gradients and weights, gradient spikes, windows without labels."""

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
from littrainer.checkpoint.retention import get_last_resumable, sort_checkpoints
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

# A gradient norm far above the median of the last MAX_NORMS norms is a spike, if there are at least MIN_NORMS.
MAX_NORMS = 100
MIN_NORMS = 20
MAX_ROLLBACKS_PER_STEP = 10
# Limit of unread numbers on the device, since each takes half a kilobyte of GPU memory.
MAX_UNREAD = 16_384
# Entries of `HealthGuard.unread` for each number.
UNREAD_FIELDS = 5
LABELS, LOSS, NORM = "labels", "loss", "norm"
# `Fault.first` of a spike: no value is non-finite.
SPIKE = "nothing"


class Fault(NamedTuple):
    """An optimizer step with non-finite numbers or a spike.

    Parameters:
        step: number of the optimizer step, from 1.
        epoch, micro_batch: epoch and number of its first micro-batch, from 0.
        loss: the first micro-batch loss that is non-finite; if none is, the sum of the micro-batch losses.
        rows: indices of the rows in the dataset.
        first: description of the value that was non-finite first, or SPIKE.
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
    """An error that ends a training because of non-finite numbers or a gradient spike.

    Parameters:
        message: description of the fault and of the way to resume.
        fault: source of the attributes `step` (from 1), `loss`, `grad_norm` and `rows` (indices in the dataset).
        checkpoint: the last healthy checkpoint, or None.
    """

    def __init__(self, message: str, fault: Fault, checkpoint: Path | None):
        super().__init__(message)
        self.step, self.loss, self.grad_norm, self.rows = fault.step, fault.loss, fault.grad_norm, fault.rows
        self._fault = fault
        self.checkpoint = checkpoint

    def __reduce__(self) -> Any:
        return type(self), (str(self), self._fault, self.checkpoint)


class RollbackRequested(Exception):
    """An exception that ends Lightning's loop for a rollback; its argument is the fault."""


class _Reading(NamedTuple):
    kind: str
    step: int
    epoch: int
    micro_batch: int
    value: float
    # For a spike, the median of the earlier norms; else None.
    exceeded_median: float | None = None

    @property
    def is_bad(self) -> bool:
        return self.exceeded_median is not None or not math.isfinite(self.value)

    @property
    def is_bad_loss(self) -> bool:
        return self.kind == LOSS and not math.isfinite(self.value)


class HealthGuard(StepPolicy):
    """Policy that looks for non-finite losses, gradient norms and weights, and for spikes of the gradient norm.

    `on_nonfinite` decides whether such a fault warns or ends the training; `spike_factor` defines a spike.

    Numbers are read in a single transfer at logs and saves, to avoid device syncs.

    Attributes:
        skipped_windows: epoch and number of the first micro-batch of each window that is skipped.
        rollback_counts: rollbacks by optimizer step.
        losses: sum of all losses up to each saved optimizer step.
        unread: kind, step, epoch, micro-batch and value of each loss, norm and label count since the last check. The
            list is flat, since a tuple for each number would start Python's garbage collection earlier.
    """

    _windows = weak_property("_windows_reference")

    def __init__(self, on_nonfinite: str = "warn", spike_factor: float | None = None):
        self.on_nonfinite, self.spike_factor = on_nonfinite, spike_factor
        self.skipped_windows: list[tuple[int, int]] = []
        self.recent_norms: deque[float] = deque(maxlen=MAX_NORMS)
        self.unread: list[Any] = []
        self.values = HostValues()
        self.rollback_counts: Counter[int] = Counter()
        self.losses: dict[int, float] = {}
        self._accepted: deque[_Reading] = deque(maxlen=MAX_UNREAD)
        self._has_loss_scaling = self._has_warned = self._has_warned_of_labels = False
        self._counted_steps = self._unlabelled_steps = 0
        self._earlier_checkpoints: Any = None

    def begin(self, windows: WindowLoader, model: Any, accelerator: Any, run_dir: str, checkpoint: Path | None) -> None:
        self._windows = windows
        self._model = model
        self._run_dir = run_dir
        self._resumed_from = [] if checkpoint is None else [str(checkpoint)]
        # The scaler skips overflowing steps while it searches the scale.
        self._has_loss_scaling = accelerator.scaler is not None
        self.unread = []
        self._has_warned = False
        self._accepted.clear()
        if self._earlier_checkpoints is None:
            resumed = {} if checkpoint is None else _list_checkpoints(checkpoint.parent)
            self._earlier_checkpoints = {*_list_checkpoints(run_dir).values()} - {resumed.get(str(checkpoint))}

    def resume(self, record: Mapping[str, Any], is_same_data: bool) -> None:
        """Restore a resume record; positions only for the same data."""
        positions = map(tuple, record.get("left_out", ()) if is_same_data else ())
        self.skipped_windows += [position for position in positions if position not in self.skipped_windows]
        self.recent_norms = deque(record.get("recent_norms", ()), MAX_NORMS)

    def record(self) -> dict[str, Any]:
        entries = {"left_out": [*map(list, self.skipped_windows)], "recent_norms": [*self.recent_norms]}
        return {name: value for name, value in entries.items() if value}

    def record_loss(self, step: int, loss: RunningLoss) -> None:
        """Record the sum of the losses, for a rollback to this save."""
        self.losses[step] = loss.before_last_log + mean_over_processes(loss.since_last_log)

    def check(self, is_save_due: bool = False, is_end: bool = False) -> None:
        """Read the unread numbers and report non-finite numbers and spikes.

        Weights are checked too at the end of training and, if `on_nonfinite` is "stop", before each save.

        Raises:
            UnhealthyTrainingError: a number is non-finite or a spike, and `on_nonfinite` is "stop".
        """
        readings = [*self._accepted, *self._pop_readings()]
        self._accepted.clear()
        if self._unlabelled_steps and not self._has_warned_of_labels:
            self._has_warned_of_labels = True
            self._warn(
                f"{self._unlabelled_steps} of {self._counted_steps} optimizer steps so far "
                f"({self._unlabelled_steps / self._counted_steps:.1%}) have no label that counts: all are "
                f"{IGNORED_LABEL}. Their loss is divided by 0. Leave such samples out of the data, or truncate them at "
                "a greater length."
            )
        stops = self.on_nonfinite == "stop"
        checks_weights = is_end or (is_save_due and stops)
        are_finite = all(map(math.isfinite, [reading.value for reading in readings]))
        has_bad = not are_finite or bool({reading.exceeded_median for reading in readings} - {None})
        if not (stops or checks_weights or has_bad):
            self._has_warned = False
            return
        norms = [reading for reading in readings if reading.kind == NORM]
        bad = [norm for norm in norms if norm.is_bad]
        # Norms are equal in all processes, so at a bad norm all processes get here, and can gather their faults. A bad
        # loss may be in a single process, which must not wait for the others.
        can_gather = bool(bad) or stops
        if self._has_loss_scaling and not MIN_NORMS <= len(bad) == len(norms):
            bad = [norm for norm in bad if math.isfinite(norm.value)]
        steps = [norm.step for norm in bad] + [reading.step for reading in readings if reading.is_bad_loss]
        fault = self._make_fault([reading for reading in readings if reading.step == min(steps)]) if steps else None
        fault = _select_first(all_gather_object(fault)) if can_gather else fault
        is_of_weights = fault is None and checks_weights and not self._has_warned
        if is_of_weights:
            fault = self._make_weight_fault(readings)
            # Without "stop", processes that have warned before skip this block, so a gather would hang.
            fault = _select_first(all_gather_object(fault)) if stops else fault
        if fault is None:
            self._has_warned = False
        elif stops:
            raise self._make_error(fault, "on_nonfinite='stop' ends the training before a checkpoint contains this.")
        elif not self._has_warned:
            # Damaged weights would repeat the warning at each later check.
            self._has_warned = fault.first != SPIKE
            self._warn(f"{fault.text} {self._describe_resume()}", on_all_ranks=not (can_gather or is_of_weights))

    def _pop_readings(self) -> list[_Reading]:
        columns = [self.unread[field::UNREAD_FIELDS] for field in range(UNREAD_FIELDS)]
        self.unread = []
        unread = [entry for entry in zip(*columns, strict=True) if entry[-1] is not None]
        if not unread:
            return []
        values = self.values.to_list([value for *_, value in unread])
        readings = [
            _Reading(kind, step, epoch, micro_batch, value)
            for (kind, step, epoch, micro_batch, _), value in zip(unread, values, strict=True)
        ]
        labels = [reading.value for reading in readings if reading.kind == LABELS]
        self._counted_steps += len(labels)
        self._unlabelled_steps += labels.count(0)
        return readings if self.spike_factor is None else [self._detect_spike(reading) for reading in readings]

    def _detect_spike(self, reading: _Reading) -> _Reading:
        """Return the reading; in a spike, set `exceeded_median` to the median of the earlier norms."""
        if self.spike_factor is None or reading.kind != NORM or not math.isfinite(reading.value):
            return reading
        median = statistics.median(self.recent_norms) if len(self.recent_norms) >= MIN_NORMS else math.inf
        # Spikes are recorded too, so that permanently larger gradients raise the median.
        self.recent_norms.append(reading.value)
        is_spike = reading.value > self.spike_factor * median
        return reading._replace(exceeded_median=median) if is_spike else reading

    def _warn(self, text: str, on_all_ranks: bool = False) -> None:
        if on_all_ranks or get_rank() == 0:
            logger.warning(text)

    def _make_fault(self, readings: list[_Reading], weights_are_unchanged: bool = False) -> Fault:
        norm = next((reading for reading in readings if reading.kind == NORM), None)
        losses = {reading.micro_batch: reading.value for reading in readings if reading.kind == LOSS}
        bad = [reading.micro_batch for reading in readings if reading.is_bad_loss]
        micro_batches = bad[:1] or list(losses)
        loss = losses[bad[0]] if bad else sum(losses.values()) if losses else None
        _, step, epoch, micro_batch, *_ = readings[0]
        batch_rows = [self._windows.find_rows(epoch, number) for number in micro_batches]
        rows = None if None in batch_rows else [row for indices in batch_rows for row in indices or ()]
        bad_weights = listed(find_nonfinite_weights(self._model))
        if norm is not None and norm.exceeded_median is not None and not bad:
            first = SPIKE
            text = f"the gradient norm is {norm.value:.4g}, above spike_factor={self.spike_factor:g} times the median "
            text += f"of those before, {norm.exceeded_median:.4g}."
        else:
            first = self._find_nonfinite_data(readings, rows)
            if not first and weights_are_unchanged and bad_weights:
                first = f"the weights ({bad_weights})"
            # Weights that are non-finite now may have been non-finite in this step already.
            suspects = ("the loss", "the data" * (rows is None), "the weights" * bool(bad_weights))
            first = first or (" or ".join(filter(None, suspects)) if bad else "the gradients")
            norm_text = "" if norm is None else f" and the gradient norm {norm.value:.4g}"
            text = f"the loss is {math.nan if loss is None else loss:.4g}{norm_text}. First non-finite value: {first}."
        if rows is not None:
            text += f" The rows of {'this batch' if bad else 'its batches'} are {listed(rows)} of the train_dataset."
        elif micro_batches:
            text += " The fault is in" if bad else " The step begins with"
            text += f" micro-batch {micro_batches[0] + 1} of epoch {epoch + 1}."
        if get_world_size() > 1 and bad:
            text += f" Process {get_rank()} computed this loss."
        if bad_weights and not weights_are_unchanged:
            text += f" By now these weights are not finite: {bad_weights}."
        return Fault(step, epoch, micro_batch, loss, norm and norm.value, rows, first, f"Optimizer step {step}: {text}")

    def _make_weight_fault(self, readings: list[_Reading]) -> Fault | None:
        step, bad_weights = readings[-1].step if readings else 0, listed(find_nonfinite_weights(self._model))
        text = f"After optimizer step {step} these weights are not finite: {bad_weights}."
        return Fault(step, 0, 0, None, None, None, f"the weights ({bad_weights})", text) if bad_weights else None

    def _find_nonfinite_data(self, readings: list[_Reading], rows: list[int] | None) -> str:
        """Describe missing labels or the first non-finite row; empty if there is none."""
        if any(reading.kind == LABELS and reading.value == 0 for reading in readings):
            return f"the loss, divided by 0 labels (all are {IGNORED_LABEL})"
        states = get_rng_states(gpu=False)
        try:
            dataset = getattr(self._windows.loader, "dataset", None)
            samples = {row: dataset[row] for row in rows or ()}  # type: ignore[index]
        except Exception:
            # Some datasets can only be read in their workers.
            return ""
        finally:
            set_rng_states(states)
        for row, sample in samples.items():
            fields = sample if isinstance(sample, Mapping) else {"it": sample}
            if names := [str(name) for name, value in fields.items() if _contains_nonfinite(value)]:
                return f"the data, row {row} in {listed(names)}"
        return ""

    def _describe_resume(self) -> str:
        checkpoint = self.find_healthy_checkpoint()
        if checkpoint is None:
            return "There is no healthy checkpoint."
        hint = "" if self.on_nonfinite == "rollback" else ' (set on_nonfinite="rollback" to leave this batch out)'
        return f"The last healthy checkpoint is {checkpoint}. To resume{hint}: {resume_command(str(checkpoint))}"

    def _make_error(self, fault: Fault, action: str) -> UnhealthyTrainingError:
        text = f"{fault.text} {action} {self._describe_resume()}"
        return UnhealthyTrainingError(text, fault, self.find_healthy_checkpoint())

    def find_healthy_checkpoint(self) -> Path | None:
        """Return the newest checkpoint of this training without known non-finite weights."""
        checkpoints = _list_checkpoints(self._run_dir).items()
        current = [path for path, identity in checkpoints if identity not in self._earlier_checkpoints]
        newest = get_last_resumable([*self._resumed_from, *current])
        return None if newest is None else Path(newest)


class SkippingHealthGuard(HealthGuard):
    """A guard that reads the norm at each optimizer step, before the weights change, and skips bad steps."""

    def on_window_begin(self) -> None:
        """Copy the buffers that forward passes change."""
        self._buffers = copy_buffers(self._model)

    def should_skip_step(self) -> bool:
        """Return whether to skip the optimizer step, by its losses and gradient norm.

        Raises:
            RollbackRequested: `on_nonfinite` is "rollback", and a number is bad.
            UnhealthyTrainingError: the weights are non-finite.
        """
        readings = self._pop_readings()
        norm = readings[-1]
        has_bad_loss = any_rank(any(reading.is_bad_loss for reading in readings))
        is_scaler_overflow = self._has_loss_scaling and not math.isfinite(norm.value)
        if not has_bad_loss and (not norm.is_bad or is_scaler_overflow):
            self._accepted += readings
            return False
        restore_buffers(self._buffers)
        fault = _select_first(all_gather_object(self._make_fault(readings, weights_are_unchanged=True)))
        if self.on_nonfinite == "rollback":
            raise RollbackRequested(fault)
        if fault.first.startswith("the weights"):
            raise self._make_error(fault, "Leaving out steps does not repair weights, so the training ends.")
        self._warn(f"on_nonfinite='skip' leaves out this optimizer step. {fault.text}")
        return True

    def prepare_rollback(self, fault: Fault, max_steps_without_window: int) -> str:
        """Skip the window of a fault from now on, and return the folder of the checkpoint to continue from.

        Parameters:
            max_steps_without_window: length of the training if it skips the window.

        Raises:
            UnhealthyTrainingError: there is no checkpoint, no other window, or MAX_ROLLBACKS_PER_STEP rollbacks at this
                step did not help.
        """
        checkpoints = _list_checkpoints(self._run_dir).items()
        ignored = [Path(path).name for path, identity in checkpoints if identity in self._earlier_checkpoints]
        folder = (
            None if get_rank() else find_last_intact(self._run_dir, ignored) or get_last_resumable(self._resumed_from)
        )
        folder = broadcast_object(folder)
        if folder is None:
            raise self._make_error(fault, "on_nonfinite='rollback' has nowhere to go back to.")
        if max_steps_without_window <= 0:
            action = "on_nonfinite='rollback' has left out all other batches, so nothing is trained."
            raise self._make_error(fault, action)
        self.rollback_counts[fault.step] += 1
        if self.rollback_counts[fault.step] > MAX_ROLLBACKS_PER_STEP:
            raise self._make_error(
                fault, f"{MAX_ROLLBACKS_PER_STEP} batches have been left out at this step, which is no progress."
            )
        self.skipped_windows.append((fault.epoch, fault.micro_batch))
        self._warn(
            f"{fault.text} on_nonfinite='rollback' goes back to {folder} and leaves this optimizer step's rows out."
        )
        return str(folder)


def _select_first(faults: list[Fault | None]) -> Any:
    """Return the earliest fault, preferably with a non-finite loss."""
    present = [fault for fault in faults if fault is not None]
    return min(present, key=lambda fault: (fault.step, math.isfinite(fault.loss or 0)), default=None)


def _contains_nonfinite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_contains_nonfinite, value.values()))
    with suppress(TypeError, ValueError, RuntimeError):
        tensor = torch.as_tensor(value)
        return tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
    return isinstance(value, (list, tuple)) and any(map(_contains_nonfinite, value))


def _list_checkpoints(run_dir: str | Path) -> dict[str, tuple[str, int]]:
    """Return checkpoints in order, each with an identity that changes when it is replaced."""
    states = [Path(path, TRAINER_STATE_NAME) for path in sort_checkpoints(run_dir)]
    return {str(state.parent): (state.parent.name, state.stat().st_mtime_ns) for state in states if state.is_file()}
