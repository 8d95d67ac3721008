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

from littrainer.checkpoint.atomic_write import newest_healthy_of, sort_checkpoints
from littrainer.checkpoint.layout import TRAINER_STATE_NAME
from littrainer.checkpoint.weights import names_of_sick
from littrainer.data.windows import IGNORED_LABEL
from littrainer.data.workers import host_states, set_host_states
from littrainer.distributed.agreement import agreed, from_each, from_first
from littrainer.distributed.collectives import process_count, process_rank
from littrainer.errors.notes import listed
from littrainer.training.interruption_report import command

if TYPE_CHECKING:
    from littrainer.data.windows import WindowLoader

logger = logging.getLogger(__name__)

# Gradient norms whose median is the usual one, and how many there have to be before any counts as a spike.
NORMS_COMPARED, FEWEST_NORMS = 100, 20
# Batches left out at one optimizer step, after which going back is no progress.
MOST_LEFT_OUT = 10
# Numbers that wait to be read: more are read without a log, since each takes half a kilobyte on a GPU.
MOST_UNREAD = 16_384
LABELS, LOSS, NORM = "labels", "loss", "norm"
# What was not finite first, where all is.
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


class GoingBack(Exception):
    """Takes a training out of Lightning's loop to go on from the last healthy checkpoint; its argument is the fault."""


class _Number(NamedTuple):
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


class HealthGuard:
    """Looks at the numbers of a training, and acts as `on_nonfinite` and `spike_factor` ask.

    Parameters:
        way, spike_factor: `on_nonfinite` and `spike_factor` of the arguments.

    Attributes:
        left_out: windows that are not trained on, each as its epoch and the number of its first micro-batch.
        recent_norms: the last norms that are finite, of which the median is the usual one.
        returns: how often the training has gone back, by the optimizer step at which it did.
        losses: by optimizer step, the sum of the losses when its checkpoint was saved.
        unread: losses, norms and numbers of labels that wait to be read: kind, place, tensor or number.
    """

    def __init__(self, way: str = "warn", spike_factor: float | None = None):
        self.way, self.spike_factor = way, spike_factor
        self.left_out: list[tuple[int, int]] = []
        self.recent_norms: deque[float] = deque(maxlen=NORMS_COMPARED)
        self.unread: list[tuple[str, tuple[int, int, int], Any]] = []
        self._known: deque[_Number] = deque(maxlen=MOST_UNREAD)
        self._left_to_loss_scaling = self._is_told = self._has_told_of_labels = False
        # Optimizer steps whose labels were counted, and those of them without any.
        self._windows = self._empty_windows = 0
        self.returns: Counter[int] = Counter()
        self.losses: dict[int, float] = {}
        # Checkpoints of earlier trainings in the same folder.
        self._of_others: set[Any] | None = None

    # ---- What a training tells it ------------------------------------------------------------------------------------

    def begin(self, windows: WindowLoader, model: Any, accelerator: Any, run_dir: str, checkpoint: Path | None) -> None:
        """A training begins, or goes on from a checkpoint."""
        self._windows_read, self._model, self._run_dir, self._resumed_from = windows, model, run_dir, checkpoint
        # It leaves out steps whose gradients overflow, which belongs to finding the scale.
        self._left_to_loss_scaling = accelerator.scaler is not None
        self.unread, self._is_told = [], False
        self._known.clear()
        if self._of_others is None:
            resumed = {} if checkpoint is None else _checkpoints_in(checkpoint.parent)
            self._of_others = {*_checkpoints_in(run_dir).values()} - {resumed.get(str(checkpoint))}

    def resume(self, record: Mapping[str, Any], is_same_data: bool) -> None:
        """Go on with what a checkpoint's resume record keeps of it, if places in the data mean the same as then."""
        places = map(tuple, record.get("left_out", ()) if is_same_data else ())
        self.left_out += [place for place in places if place not in self.left_out]
        self.recent_norms = deque(record.get("recent_norms", ()), NORMS_COMPARED)

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        found = {"left_out": [*map(list, self.left_out)], "recent_norms": [*self.recent_norms]}
        return {name: value for name, value in found.items() if value}

    def refuses(self) -> bool:
        """Return whether the optimizer step that comes next is left out, by its losses and the norm of its gradients.

        Raises:
            GoingBack: the training goes back to its last healthy checkpoint.
            UnhealthyTrainingError: the weights are not finite, so that leaving out steps does not help.
        """
        of_step = self._read()
        norm = of_step[-1]
        # Losses are those of this process.
        has_bad_loss = agreed(any(one.is_bad_loss for one in of_step))
        is_left_to_scaling = self._left_to_loss_scaling and not math.isfinite(norm.value)
        if not has_bad_loss and (not norm.is_bad or is_left_to_scaling):
            self._known += of_step
            return False
        fault = _first(from_each(self._fault(of_step, weights_are_as_then=True)))
        if self.way == "rollback":
            raise GoingBack(fault)
        if fault.first.startswith("the weights"):
            raise self._error(fault, "Leaving out steps does not help then, so the training ends.")
        self._warn(f"on_nonfinite='skip' leaves out this optimizer step. {fault.text}")
        return True

    # ---- Looking -----------------------------------------------------------------------------------------------------

    def look(self, comes_save: bool = False, is_end: bool = False) -> None:
        """Read what has come up since the last look, and tell what is not healthy; called at logs, saves and the end.

        Weights are looked at too if nothing follows that would tell: at the end, and before a save under "stop".

        Raises:
            UnhealthyTrainingError: something is not, and `on_nonfinite` is "stop".
        """
        known = [*self._known, *self._read()]
        self._known.clear()
        if self._empty_windows and not self._has_told_of_labels:
            self._has_told_of_labels = True
            self._warn(
                f"{self._empty_windows} of {self._windows} optimizer steps so far "
                f"({self._empty_windows / self._windows:.1%}) have no label that counts: all are {IGNORED_LABEL}. "
                "Their loss is divided by 0. Leave such samples out of the data, or cut them off less early."
            )
        looks_at_weights = is_end or (comes_save and self.way == "stop")
        is_healthy = all(map(math.isfinite, [one.value for one in known])) and {one.usual for one in known} <= {None}
        if is_healthy and self.way != "stop" and not looks_at_weights:
            # The usual answer.
            self._is_told = False
            return
        norms = [one for one in known if one.kind == NORM]
        unhealthy = [one for one in norms if one.is_bad]
        # Norms are the same in all processes, losses are not.
        is_common = bool(unhealthy) or self.way == "stop"
        if self._left_to_loss_scaling and not FEWEST_NORMS <= len(unhealthy) == len(norms):
            unhealthy = [one for one in unhealthy if math.isfinite(one.value)]
        steps = [one.step for one in unhealthy] + [one.step for one in known if one.is_bad_loss]
        own = self._fault([one for one in known if one.step == min(steps)]) if steps else None
        fault = _first(from_each(own)) if is_common else own
        is_of_weights = fault is None and looks_at_weights and not self._is_told
        if is_of_weights:
            fault = self._fault_of_weights(known)
            # Under "stop" all have come here; else one that has told of its losses has not.
            fault = _first(from_each(fault)) if self.way == "stop" else fault
        if fault is None:
            self._is_told = False
        elif self.way == "stop":
            raise self._error(fault, "on_nonfinite='stop' ends the training before anything of it is saved.")
        elif not self._is_told:
            # The weights may have taken harm, and then each interval that follows is like this one.
            self._is_told = fault.first != SPIKE
            self._warn(f"{fault.text} {self._where_to_go_on()}", everywhere=not (is_common or is_of_weights))

    def _read(self) -> list[_Number]:
        unread, self.unread = [one for one in self.unread if one[2] is not None], []
        if not unread:
            return []
        # Most are as they have to be, and four operations take longer than the look.
        numbers = [
            value
            if type(value) is torch.Tensor and value.dtype is torch.float32 and not value.ndim
            else torch.as_tensor(value).detach().reshape(()).float()
            for _, _, value in unread
        ]
        values = torch.stack([one.to(numbers[0].device) for one in numbers]).cpu().tolist()
        read = [_Number(kind, *place, value) for (kind, place, _), value in zip(unread, values, strict=True)]
        labels = [one.value for one in read if one.kind == LABELS]
        self._windows, self._empty_windows = self._windows + len(labels), self._empty_windows + labels.count(0)
        return read if self.spike_factor is None else [one._replace(usual=self._exceeded(one)) for one in read]

    def _exceeded(self, number: _Number) -> float | None:
        """Return the median that a gradient norm is too many times of; each norm is asked about once."""
        if self.spike_factor is None or number.kind != NORM or not math.isfinite(number.value):
            return None
        usual = statistics.median(self.recent_norms) if len(self.recent_norms) >= FEWEST_NORMS else math.inf
        # Spikes too: if gradients stay as large, they are the usual ones after a while.
        self.recent_norms.append(number.value)
        return usual if number.value > self.spike_factor * usual else None

    def _warn(self, text: str, everywhere: bool = False) -> None:
        if everywhere or process_rank() == 0:
            logger.warning(text)

    # ---- Saying what it is -------------------------------------------------------------------------------------------

    def _fault(self, of_step: list[_Number], weights_are_as_then: bool = False) -> Fault:
        # What was not finite first in an optimizer step, of which these are all numbers, and with which rows.
        norm = next((one for one in of_step if one.kind == NORM), None)
        losses = {one.micro_batch: one.value for one in of_step if one.kind == LOSS}
        bad = [one.micro_batch for one in of_step if one.is_bad_loss]
        micro_batches = bad[:1] or list(losses)
        loss = losses[bad[0]] if bad else sum(losses.values()) if losses else None
        _, step, epoch, micro_batch, *_ = of_step[0]
        found = [self._windows_read.rows_of(epoch, one) for one in micro_batches]
        rows = None if None in found else [row for one in found if one is not None for row in one]
        sick_weights = listed(names_of_sick(self._model))
        if norm is not None and norm.usual is not None and not bad:
            first = SPIKE
            words = f"the gradient norm is {norm.value:.4g}, above spike_factor={self.spike_factor:g} times the median "
            words += f"of those before, {norm.usual:.4g}."
        else:
            first = self._first_in_data(of_step, rows)
            if not first and weights_are_as_then and sick_weights:
                first = f"the weights ({sick_weights})"
            # nan weights do not heal.
            of_loss = ("the loss", "the data" * (rows is None), "the weights" * bool(sick_weights))
            first = first or (" or ".join(filter(None, of_loss)) if bad else "the gradients")
            of_norm = "" if norm is None else f" and the gradient norm {norm.value:.4g}"
            words = f"the loss is {math.nan if loss is None else loss:.4g}{of_norm}. Not finite first: {first}."
        if rows is not None:
            words += f" The rows of {'this batch' if bad else 'its batches'} are {listed(rows)} of the train_dataset."
        elif micro_batches:
            words += f" It is micro-batch {micro_batches[0] + 1} of epoch {epoch + 1}."
        if process_count() > 1 and bad:
            words += f" Process {process_rank()} has it."
        if sick_weights and not weights_are_as_then:
            words += f" By now these weights are not finite: {sick_weights}."
        return Fault(
            step, epoch, micro_batch, loss, norm and norm.value, rows, first, f"Optimizer step {step}: {words}"
        )

    def _fault_of_weights(self, known: list[_Number]) -> Fault | None:
        step, sick_weights = known[-1].step if known else 0, listed(names_of_sick(self._model))
        words = f"After optimizer step {step} these weights are not finite: {sick_weights}."
        return Fault(step, 0, 0, None, None, None, f"the weights ({sick_weights})", words) if sick_weights else None

    def _first_in_data(self, of_step: list[_Number], rows: list[int] | None) -> str:
        if any(one.kind == LABELS and one.value == 0 for one in of_step):
            return f"the number of labels, which is 0 (all are {IGNORED_LABEL})"
        states = host_states()
        try:
            dataset = getattr(self._windows_read.loader, "dataset", None)
            samples = {row: dataset[row] for row in rows or ()}  # type: ignore[index]
        except Exception:
            # A dataset that can be read in its workers only.
            return ""
        finally:
            set_host_states(states)
        for row, sample in samples.items():
            parts = sample if isinstance(sample, Mapping) else {"it": sample}
            if sick := [str(name) for name, value in parts.items() if _has_sick_number(value)]:
                return f"the data, row {row} in {listed(sick)}"
        return ""

    def _where_to_go_on(self) -> str:
        healthy = self.healthy_checkpoint()
        if healthy is None:
            return "There is no healthy checkpoint."
        without = "" if self.way == "rollback" else ' (set on_nonfinite="rollback" to leave this batch out)'
        return f"The last healthy checkpoint is {healthy}. To resume{without}: {command(str(healthy))}"

    def _error(self, fault: Fault, what_is_done: str) -> UnhealthyTrainingError:
        text = f"{fault.text} {what_is_done} {self._where_to_go_on()}"
        return UnhealthyTrainingError(text, fault, self.healthy_checkpoint())

    # ---- Going back --------------------------------------------------------------------------------------------------

    def healthy_checkpoint(self) -> Path | None:
        """The newest checkpoint of this training whose weights are not known to be sick; None if there is none."""
        own = [path for path, one in _checkpoints_in(self._run_dir).items() if one not in (self._of_others or ())]
        given = [] if self._resumed_from is None or not self._resumed_from.is_dir() else [str(self._resumed_from)]
        found = newest_healthy_of([*given, *own])
        return None if found is None else Path(found)

    def go_back(self, fault: Fault) -> str:
        """Leave the window of a fault out from now on, and return the folder of the checkpoint to go on from.

        Raises:
            UnhealthyTrainingError: there is none, or going back there does not help.
        """
        folder = from_first(self.healthy_checkpoint() if process_rank() == 0 else None)
        if folder is None:
            raise self._error(fault, "on_nonfinite='rollback' has nowhere to go back to.")
        self.returns[fault.step] += 1
        if self.returns[fault.step] > MOST_LEFT_OUT:
            raise self._error(fault, f"{MOST_LEFT_OUT} batches have been left out at this step, which is no progress.")
        self.left_out.append((fault.epoch, fault.micro_batch))
        self._warn(
            f"{fault.text} on_nonfinite='rollback' goes back to {folder} and leaves this optimizer step's rows out."
        )
        return str(folder)


def _first(faults: list[Fault | None]) -> Any:
    found = [one for one in faults if one is not None]
    # Of the processes with a loss that is not finite the first one.
    return min(found, key=lambda one: (one.step, math.isfinite(one.loss or 0)), default=None)


def _has_sick_number(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_sick_number, value.values()))
    with suppress(TypeError, ValueError, RuntimeError):
        tensor = torch.as_tensor(value)
        return tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
    return isinstance(value, (list, tuple)) and any(map(_has_sick_number, value))


def _checkpoints_in(run_dir: str | Path) -> dict[str, tuple[str, int]]:
    # By path, in the order of their steps, what tells them from others that may have stood there.
    states = [Path(path, TRAINER_STATE_NAME) for path in sort_checkpoints(run_dir)]
    return {str(state.parent): (state.parent.name, state.stat().st_mtime_ns) for state in states if state.is_file()}
