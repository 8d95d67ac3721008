"""At which batch an error came up, said in a note below it.

Found out from the traceback of the error, so that nothing is noted down while all goes well.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from littrainer.data.columns import first_sample
from littrainer.data.workers import MOST_NAMED, reading_in
from littrainer.engine.advice import advice_for, readable_range
from littrainer.errors.lazy_isinstance import package_of
from littrainer.errors.nested_values import described
from littrainer.errors.notes import add_note

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerState

# Module and function whose call means that something was done with a batch -> its local variable that holds it.
FORWARD_PASSES = {
    ("littrainer.training.step", "loss_of"): "micro_batch",
    ("littrainer.evaluation.loop", "step"): "inputs",
}
BACKWARD_PASSES = {("littrainer.engine.module", "backward"), ("lightning.pytorch.core.module", "backward")}
LOADER = "torch.utils.data.dataloader"


class _Found(NamedTuple):
    """What the traceback of an error says of its batch.

    Parameters:
        doing: half a sentence on what was done.
        batch: the batch, if there is one yet.
        evaluates: whether it is one of an evaluation.
    """

    doing: str
    batch: Any
    evaluates: bool


class NotedBatches(AbstractContextManager[None]):
    """An error that leaves it over a batch carries notes: what the batch is, and what to do if that is known."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, raised_in: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            return
        # Whatever goes wrong here must not replace the error.
        with suppress(Exception):
            # What has a note was told of where it came up.
            if getattr(error, "__notes__", None):
                return
            found = _found_in(raised_in)
            if found is None or (found.batch is not None and _is_ours(raised_in)):
                return
            trainer = self._trainer
            state = trainer.state if trainer.is_in_train else None
            when = _when(trainer.args, state, found.evaluates)
            add_note(error, f"It came up {found.doing}{when}{_described(found.batch)}.")
            sample = partial(first_sample, trainer, found.evaluates)
            for sentence in advice_for(error, trainer.model, found.batch, trainer.args, found.evaluates, sample):
                add_note(error, sentence)


def _found_in(raised_in: TracebackType | None) -> _Found | None:
    found = None
    for frame, _ in traceback.walk_tb(raised_in):
        place = (str(frame.f_globals.get("__name__")), frame.f_code.co_name)
        if place in FORWARD_PASSES:
            batch = frame.f_locals.get(FORWARD_PASSES[place])
            evaluates = place[0] != "littrainer.training.step"
            found = _Found("with a batch", getattr(batch, "inputs", batch), evaluates)
        elif place in BACKWARD_PASSES:
            micro_batch = getattr(frame.f_locals.get("self"), "micro_batch", None)
            found = _Found("in the backward pass of a batch", getattr(micro_batch, "inputs", None), False)
        elif place[0] == LOADER:
            found = _Found(reading_in(raised_in) or "while data was read for a batch", None, _evaluates(raised_in))
    return found


def _is_ours(raised_in: TracebackType | None) -> bool:
    """Whether littrainer itself raised an error, whose message then says what there is to say."""
    *_, (frame, _) = traceback.walk_tb(raised_in)
    return package_of(frame) == "littrainer"


def _evaluates(raised_in: TracebackType | None) -> bool:
    modules = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(raised_in))
    return "littrainer.evaluation.batch_stream" in modules


def _when(args: TrainingArguments, state: TrainerState | None, evaluates: bool) -> str:
    process = f" in process {args.process_index}" if args.world_size > 1 else ""
    if state is None:
        return f" of an evaluation{process}"
    step, last = state.global_step, state.max_steps
    if evaluates:
        return f" of the evaluation at optimizer step {step} of {last}{process}"
    return f" of optimizer step {min(step + 1, last)} of {last}{process}"


def _described(batch: Any) -> str:
    if not isinstance(batch, Mapping) or not batch:
        return "" if batch is None else f": {type(batch).__name__}"
    entries = [f"{name} {_entry(value)}" for name, value in list(batch.items())[:MOST_NAMED]]
    return f": {'; '.join(entries)}" + ("; ..." if len(batch) > MOST_NAMED else "")


def _entry(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    limits = readable_range(value)
    of_numbers = ""
    if limits is not None:
        least, greatest = (f"{number:.4g}" if isinstance(number, float) else str(number) for number in limits)
        of_numbers = f", all {least}" if least == greatest else f" from {least} to {greatest}"
    return f"{described(value)}{of_numbers}"
