"""Which Lightning callback an error came from, said in a note below it."""

from __future__ import annotations

import traceback
from contextlib import AbstractContextManager
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any

from littrainer.callbacks.lightning_callbacks import name_of_evaluations
from littrainer.errors.notes import add_note

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.trainer import Trainer


class NotedLightningCallbacks(AbstractContextManager[None]):
    """An error that leaves it carries a note with the callback, its hook and the optimizer step.

    Found out from the traceback of the error, so that calling hooks costs nothing.

    Parameters:
        trainer: the Trainer.
        lightning_trainer: what calls the hooks.
    """

    def __init__(self, trainer: Trainer, lightning_trainer: pl.Trainer):
        self._trainer = trainer
        self._lightning_trainer = lightning_trainer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, raised_in: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            return
        found = _hook_in(raised_in, users_callbacks(self._lightning_trainer))
        if found is None:
            return
        callback, hook = found
        # In some hooks Lightning has counted the step already; outside of training it counts none.
        step = max(self._lightning_trainer.global_step, self._trainer.state.global_step)
        where = f"{type(callback).__name__}.{hook}"
        add_note(error, f"It came from the Lightning callback {where}, at optimizer step {step}.")
        monitored: Any = getattr(callback, "monitor", None)
        meant = name_of_evaluations(monitored)
        if meant is not None and monitored in str(error):
            add_note(
                error,
                f"The names that a Trainer's evaluations log begin with `eval_`: set monitor={meant!r}, or log a "
                f"value under {monitored!r} before it is looked for.",
            )


def users_callbacks(lightning_trainer: pl.Trainer) -> list[Any]:
    """The Lightning callbacks beside the Trainer's own."""
    from littrainer.engine.bridge import ClosingEvents, OpeningEvents

    callbacks = lightning_trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if not isinstance(callback, (OpeningEvents, ClosingEvents))]


def _hook_in(raised_in: TracebackType | None, callbacks: list[Any]) -> tuple[Any, str] | None:
    """The innermost hook of one of the callbacks among the calls that an error came through."""
    if not callbacks:
        return None
    from lightning.pytorch import Callback

    # Functions that are no methods, as those of a LambdaCallback.
    functions: dict[CodeType, tuple[Any, str]] = {
        value.__code__: (callback, name)
        for callback in callbacks
        for name, value in vars(callback).items()
        if hasattr(value, "__code__")
    }
    found = None
    for frame, _ in traceback.walk_tb(raised_in):
        code = frame.f_code
        if code in functions:
            found = functions[code]
        elif code.co_argcount and code.co_name in vars(Callback):
            called_on = frame.f_locals.get(code.co_varnames[0])
            if any(called_on is callback for callback in callbacks):
                found = called_on, code.co_name
    return found
