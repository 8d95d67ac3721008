"""The health of a training: losses, gradients and weights that are not finite, spikes, windows without labels.

Losses and gradient norms are kept on their device and read in one go, when a log or a save comes, so that nothing waits
between two logs. `on_nonfinite="skip"` and `"rollback"` read the norm at each optimizer step, before weights change.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from littrainer.checkpoint.checksums import files_in
from littrainer.checkpoint.distributed_resume import NEEDED_TO_RESUME
from littrainer.checkpoint.layout import PREFIX_CHECKPOINT_DIR, TRAINER_STATE_NAME, checkpoint_step
from littrainer.checkpoint.verification import damage_in, has_finite_weights, missing_from
from littrainer.checkpoint.weights import is_finite
from littrainer.data.windows import IGNORED_LABEL
from littrainer.data.workers import host_states, set_host_states
from littrainer.distributed.agreement import agreed, from_each, from_first
from littrainer.distributed.collectives import process_count, process_rank
from littrainer.training.interruption_report import command

if TYPE_CHECKING:
    from littrainer.training.run import TrainingRun

logger = logging.getLogger(__name__)

# Gradient norms whose median is the usual one, and how many there have to be before any counts as a spike.
NORMS_COMPARED, FEWEST_NORMS = 100, 20
# Returns to one checkpoint, after which going back is no progress.
MOST_RETURNS = 10
MOST_NAMED = 20
# Numbers that wait as one tensor each, which on a GPU takes half a kilobyte.
MOST_SINGLE = 1024
LABELS, LOSS, NORM = "labels", "loss", "norm"
# What was not finite first, where all is.
SPIKE = "nothing"


class Place(NamedTuple):
    """A window, or one micro-batch of it.

    Parameters:
        step: the optimizer step, counted from 1.
        epoch, micro_batch: counted from 0; of a window its first micro-batch.
    """

    step: int
    epoch: int
    micro_batch: int


@dataclass(frozen=True)
class Fault:
    """An optimizer step whose numbers are not healthy; what is not known is None.

    Parameters:
        place: its window.
        loss: the first one of a micro-batch that is not finite, else the sum of all.
        grad_norm: norm of the gradients before clipping.
        rows: indices in the dataset of the rows it came up with.
        first: what was not finite first.
        text: all of this in words.
    """

    place: Place
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
        self.step, self.loss, self.grad_norm, self.rows = fault.place.step, fault.loss, fault.grad_norm, fault.rows
        self.checkpoint = checkpoint


class GoingBack(Exception):
    """Takes a training out of Lightning's loop to go on from the last healthy checkpoint; its argument is the fault."""


class _Number(NamedTuple):
    kind: str
    place: Place
    value: float


class _Unread:
    """Numbers on a device that wait to be read in one go."""

    def __init__(self) -> None:
        self._of: list[tuple[str, Place]] = []
        self._single: list[torch.Tensor] = []
        self._joined: list[torch.Tensor] = []

    def add(self, kind: str, place: Place, number: Any) -> None:
        if number is None:
            return
        if not isinstance(number, torch.Tensor) or number.dim() or number.dtype is not torch.float32:
            number = torch.as_tensor(number).detach().reshape(()).float()
        self._of.append((kind, place))
        self._single.append(number)
        if len(self._single) >= MOST_SINGLE:
            self._join()

    def _join(self) -> None:
        if self._single:
            device = self._single[0].device
            self._joined.append(torch.stack([one.detach().to(device) for one in self._single]))
            self._single = []

    def take(self) -> list[_Number]:
        self._join()
        of, joined = self._of, self._joined
        self._of, self._joined = [], []
        if not of:
            return []
        values = torch.cat([one.to(joined[0].device) for one in joined]).cpu().tolist()
        return [_Number(kind, place, value) for (kind, place), value in zip(of, values, strict=True)]


class HealthGuard:
    """Looks at the numbers of a training, and acts as `on_nonfinite` and `spike_factor` ask.

    Parameters:
        way: what `on_nonfinite` says.
        spike_factor: how many times the usual norm is too much; None for any.

    Attributes:
        left_out: windows that are not trained on, each as its epoch and the number of its first micro-batch.
        recent_norms: healthy norms, of which the median is the usual one.
    """

    def __init__(self, way: str = "warn", spike_factor: float | None = None):
        self.way, self.spike_factor = way, spike_factor
        self.left_out: list[tuple[int, int]] = []
        self.recent_norms: deque[float] = deque(maxlen=NORMS_COMPARED)
        self._acts_at_each_step = way in ("skip", "rollback")
        self._run: TrainingRun | None = None
        self._window = Place(1, 0, 0)
        self._unread = _Unread()
        self._known: list[_Number] = []
        self._is_told = False
        self._windows, self._has_told_of_labels = 0, False
        self._returns: Counter[Path] = Counter()
        # Checkpoints of earlier trainings in the same folder.
        self._of_others: set[tuple[str, int]] | None = None

    # ---- What a training tells it ------------------------------------------------------------------------------------

    def begin(self, run: TrainingRun) -> None:
        """A training begins, or goes on from a checkpoint."""
        self._run, self._unread, self._known, self._is_told = run, _Unread(), [], False
        if self._of_others is None:
            self._of_others = set(map(_identity, _checkpoints_in(run.folder)))
            self._of_others -= {_identity(run.checkpoint)} if run.checkpoint is not None else set()

    def resume(self, record: Mapping[str, Any], is_same_data: bool) -> None:
        """Go on with what a checkpoint's resume record keeps of it, if places in the data mean the same as then."""
        places = [(epoch, micro_batch) for epoch, micro_batch in record.get("left_out", ())]
        if is_same_data:
            self.left_out += [place for place in places if place not in self.left_out]
        elif places:
            logger.warning(
                "Batches that on_nonfinite='rollback' has left out before are trained on if they come again: with "
                "other sizes of batches they cannot be found."
            )
        self.recent_norms.clear()
        self.recent_norms.extend(record.get("recent_norms", ()))

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps of it; nothing if there is nothing."""
        found = {"left_out": [list(place) for place in self.left_out], "recent_norms": list(self.recent_norms)}
        return {name: value for name, value in found.items() if value}

    def open_window(self, place: Place, labels: Any) -> None:
        """The first micro-batch of an optimizer step comes next, whose loss is divided by so many labels, if known."""
        self._window = place
        if isinstance(labels, torch.Tensor):
            self._unread.add(LABELS, place, labels)

    def note_loss(self, loss: torch.Tensor, micro_batch: int) -> None:
        """The forward pass of a micro-batch is done, of which the epoch's number, counted from 0, is given."""
        self._unread.add(LOSS, Place(self._window.step, self._window.epoch, micro_batch), loss)

    def refuses(self, norm: Any) -> bool:
        """Return whether an optimizer step is left out, of whose gradients this is the norm.

        Raises:
            GoingBack: the training goes back to its last healthy checkpoint.
            UnhealthyTrainingError: the weights are not finite, so that leaving out steps does not help.
        """
        if not self._acts_at_each_step:
            self._unread.add(NORM, self._window, norm)
            return False
        value = float(norm)
        if self._is_healthy(value):
            return False
        self._known += self._unread.take()
        step = self._window.step
        of_step = [one for one in self._known if one.place.step == step]
        if self._left_to_loss_scaling and not math.isfinite(value) and not agreed(any(map(_is_bad_loss, of_step))):
            return False
        self._known = [one for one in self._known if one.place.step != step]
        own = self._fault([*of_step, _Number(NORM, self._window, value)], weights_are_as_then=True)
        fault = _first(from_each(own))
        if self.way == "rollback":
            raise GoingBack(fault)
        if fault.first.startswith("the weights"):
            raise self._error(fault, "Leaving out steps does not help then, so the training ends.")
        self._warn(f"on_nonfinite='skip' leaves out this optimizer step. {fault.text}")
        return True

    # ---- Looking -----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read what has come up since the last look, and tell what is not healthy; called at logs, saves and the end.

        Raises:
            UnhealthyTrainingError: something is not, and `on_nonfinite` is "stop".
        """
        known, self._known = [*self._known, *self._unread.take()], []
        values = [one.value for one in known]
        self._tell_of_windows_without_labels([one.value for one in known if one.kind == LABELS])
        if all(map(math.isfinite, values)) and self.spike_factor is None and self.way != "stop":
            # The usual answer.
            self._is_told = False
            return
        norms = [one for one in known if one.kind == NORM]
        unhealthy = [one for one in norms if not self._is_healthy(one.value)]
        # Norms are the same in all processes, losses are not.
        is_common = bool(unhealthy) or self.way == "stop"
        if self._left_to_loss_scaling and not FEWEST_NORMS <= len(unhealthy) == len(norms):
            unhealthy = [one for one in unhealthy if math.isfinite(one.value)]
        steps = [one.place.step for one in (*unhealthy, *filter(_is_bad_loss, known))]
        own = self._fault([one for one in known if one.place.step == min(steps)]) if steps else None
        fault = _first(from_each(own)) if is_common else own
        if fault is None:
            self._is_told = False
        elif self.way == "stop":
            raise self._error(fault, "on_nonfinite='stop' ends the training before anything of it is saved.")
        elif not self._is_told:
            # The weights may have taken harm, and then each interval that follows is like this one.
            self._is_told = fault.first != SPIKE
            self._warn(f"{fault.text} {self._where_to_go_on()}", everywhere=not is_common)

    def _is_healthy(self, norm: float) -> bool:
        if self.spike_factor is None or not math.isfinite(norm):
            return math.isfinite(norm)
        if len(self.recent_norms) >= FEWEST_NORMS and norm > self.spike_factor * statistics.median(self.recent_norms):
            return False
        self.recent_norms.append(norm)
        return True

    @property
    def _left_to_loss_scaling(self) -> bool:
        # It leaves out steps whose gradients overflow, which belongs to finding the scale.
        return self._run is not None and self._run.trainer.accelerator.scaler is not None

    def _tell_of_windows_without_labels(self, labels: list[float]) -> None:
        self._windows += len(labels)
        empty = labels.count(0)
        if empty and not self._has_told_of_labels:
            self._has_told_of_labels = True
            self._warn(
                f"{empty} of {self._windows} optimizer steps so far ({empty / self._windows:.1%}) have no label "
                f"that counts: all are {IGNORED_LABEL}. Their loss is divided by 0. Leave such samples out of the "
                "data, or cut them off less early."
            )

    def _warn(self, text: str, everywhere: bool = False) -> None:
        if everywhere or process_rank() == 0:
            logger.warning(text)

    # ---- Saying what it is -------------------------------------------------------------------------------------------

    def _fault(self, of_step: list[_Number], weights_are_as_then: bool = False) -> Fault:
        # What was not finite first in an optimizer step, of which these are all numbers, and with which rows.
        assert self._run is not None
        norm = next((one.value for one in of_step if one.kind == NORM), None)
        losses = {one.place.micro_batch: one.value for one in of_step if one.kind == LOSS}
        bad = [one.place.micro_batch for one in of_step if _is_bad_loss(one)]
        micro_batches = bad[:1] or list(losses)
        loss = losses[bad[0]] if bad else sum(losses.values()) if losses else None
        place = of_step[0].place
        found = [self._run.windows.rows_of(place.epoch, one) for one in micro_batches]
        rows = None if None in found else [row for one in found if one is not None for row in one]
        sick_weights = _names_of_sick(self._run.trainer.model)
        is_spike = not bad and norm is not None and math.isfinite(norm)
        first = SPIKE if is_spike else self._first_in_data(of_step, rows)
        if not first and weights_are_as_then and sick_weights:
            first = f"the weights ({_listed(sick_weights)})"
        if not first and bad:
            unknown = [*(["the data"] if rows is None else []), *([] if weights_are_as_then else ["the weights"])]
            first = " or ".join(["the loss", *unknown])
        first = first or "the gradients"
        words = [f"Optimizer step {place.step}:"]
        if is_spike:
            usual = statistics.median(self.recent_norms)
            words.append(
                f"the gradient norm is {norm:.4g}, above spike_factor={self.spike_factor:g} times the median of the "
                f"last {len(self.recent_norms)}, {usual:.4g}."
            )
        else:
            of_norm = "" if norm is None else f" and the gradient norm {norm:.4g}"
            words.append(f"the loss is {math.nan if loss is None else loss:.4g}{of_norm}. Not finite first: {first}.")
        if rows is None:
            words.append(
                f"It is micro-batch {micro_batches[0] + 1 if micro_batches else '?'} of epoch {place.epoch + 1}."
            )
        else:
            words.append(
                f"The rows of {'this batch' if bad else 'its batches'} are {_listed(rows)} of the train_dataset."
            )
        if process_count() > 1 and bad:
            words.append(f"Process {process_rank()} has it.")
        if sick_weights and not weights_are_as_then:
            words.append(f"By now these weights are not finite: {_listed(sick_weights)}.")
        return Fault(place, loss, norm, rows, first, " ".join(words))

    def _first_in_data(self, of_step: list[_Number], rows: list[int] | None) -> str:
        if any(one.kind == LABELS and one.value == 0 for one in of_step):
            return f"the number of labels, which is 0 (all are {IGNORED_LABEL})"
        assert self._run is not None
        states = host_states()
        try:
            dataset = getattr(self._run.windows.loader, "dataset", None)
            samples = {row: dataset[row] for row in rows or ()}  # type: ignore[index]
        except Exception:
            # A dataset that can be read in its workers only.
            return ""
        finally:
            set_host_states(states)
        for row, sample in samples.items():
            parts = sample if isinstance(sample, Mapping) else {"it": sample}
            if sick := [str(name) for name, value in parts.items() if _has_sick_number(value)]:
                return f"the data, row {row} in {_listed(sick)}"
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

    def healthy_checkpoint(self, is_verified: bool = False) -> Path | None:
        """The newest checkpoint of this training whose weights are not known to be sick; None if there is none.

        Parameters:
            is_verified: only an intact one counts; each byte of it is read.
        """
        assert self._run is not None
        given = self._run.checkpoint
        own = [one for one in _checkpoints_in(self._run.folder) if _identity(one) not in (self._of_others or ())]
        newest_first = sorted(own, key=lambda one: checkpoint_step(one) or 0, reverse=True)
        for folder in [*newest_first, *([] if given is None or not given.is_dir() else [given])]:
            is_complete = not missing_from(set(files_in(folder, with_links=True)), NEEDED_TO_RESUME)
            if is_complete and has_finite_weights(folder) is not False and not (is_verified and damage_in(folder)):
                return folder
        return None

    def go_back(self, fault: Fault) -> str:
        """Leave the window of a fault out from now on, and return the folder of the checkpoint to go on from.

        Raises:
            UnhealthyTrainingError: there is none, or going back there does not help.
        """
        place = (fault.place.epoch, fault.place.micro_batch)
        folder = from_first(self.healthy_checkpoint(is_verified=True) if process_rank() == 0 else None)
        if folder is None:
            raise self._error(fault, "on_nonfinite='rollback' has nowhere to go back to.")
        self._returns[folder] += 1
        if place in self.left_out or self._returns[folder] > MOST_RETURNS:
            again = "came up again without that batch" if place in self.left_out else f"is the {MOST_RETURNS + 1}th one"
            raise self._error(fault, f"It {again} since {folder.name}, so going back there is no progress.")
        self.left_out.append(place)
        self._warn(
            f"{fault.text} on_nonfinite='rollback' goes back to {folder} and leaves this optimizer step's rows out."
        )
        return str(folder)


def _is_bad_loss(number: _Number) -> bool:
    return number.kind == LOSS and not math.isfinite(number.value)


def _first(faults: list[Fault | None]) -> Any:
    found = [one for one in faults if one is not None]
    # Of the processes with a loss that is not finite the first one.
    return min(found, key=lambda one: (one.place.step, math.isfinite(one.loss or 0)), default=None)


def _listed(names: Iterable[Any]) -> str:
    texts = [str(name) for name in names]
    further = f" and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    return ", ".join(texts[:MOST_NAMED]) + further


def _names_of_sick(model: Any) -> list[str]:
    named = ((name, getattr(one, "_local_tensor", one)) for name, one in model.named_parameters())
    return [name for name, one in named if not is_finite(name, one, ())]


def _has_sick_number(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_sick_number, value.values()))
    with suppress(TypeError, ValueError, RuntimeError):
        tensor = torch.as_tensor(value)
        return tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
    return isinstance(value, (list, tuple)) and any(map(_has_sick_number, value))


def _checkpoints_in(run_dir: str) -> list[Path]:
    return [one for one in Path(run_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if (one / TRAINER_STATE_NAME).is_file()]


def _identity(folder: Path) -> tuple[str, int]:
    state = folder / TRAINER_STATE_NAME
    return folder.name, state.stat().st_mtime_ns if state.is_file() else 0
