"""Saving and stopping at an optimizer step because a signal says that the process is about to be ended.

A signal is noted when it arrives. At the next step boundary all processes agree on it, training saves a checkpoint of
that step, unless it has just saved one, and stops; `train()` returns. An evaluation is interrupted, since the time
left is short; the checkpoint says so, and a training that resumes from it makes up for it.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any

from littrainer.arguments.fields import DEFAULT_ANNOUNCING_SIGNAL
from littrainer.checkpoint.random_state import capture_random_states, set_random_states
from littrainer.data.workers import answer
from littrainer.distributed.agreement import connect_hosts, largest
from littrainer.redirection.redirect import is_installed

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerControl, TrainerState


logger = logging.getLogger(__name__)

# The entry among the states of callbacks in trainer_state.json; transformers passes over names it does not know.
BROKEN_OFF = "EvaluationBrokenOff"


def listed_callbacks(trainer: Any) -> list[Any]:
    """Return transformers' callback for `enable_jit_checkpoint` if the redirection is on, so that scripts find it.

    Its manager saves and stops if a script sets `is_checkpoint_requested`; the signals are `Preemption`'s.
    """
    if trainer.args.enable_jit_checkpoint and is_installed() and "transformers" in sys.modules:
        # transformers 4 does not have the module.
        with suppress(ImportError):
            names: Any = import_module("transformers.trainer_jit_checkpoint")
            callback = names.JITCheckpointCallback()
            callback.trainer, callback.jit_manager = trainer, names.CheckpointManager(trainer)
            return [callback]
    return []


class EvaluationBrokenOff(BaseException):
    """Ends an evaluation between two batches; no Exception, so that a script's `except Exception` lets it pass."""


class Preemption:
    """Notes signals while a training runs, and says at step boundaries whether one asks to stop.

    Parameters:
        signals: the signals that ask to stop; none of them makes this do nothing.

    Attributes:
        agreed: the signal on which all processes agreed; None until there is one.
        saved_step: the optimizer step that was saved on it.
    """

    def __init__(self, signals: Sequence[signal.Signals] = ()):
        self.signals = tuple(signals)
        self.agreed: signal.Signals | None = None
        self.saved_step: int | None = None
        self._received: signal.Signals | None = None
        self._earlier_handlers: dict[signal.Signals, Any] = {}
        self._answered_before: Sequence[signal.Signals] = ()
        self._may_break_off = False
        self._evaluation_is_due = False

    @classmethod
    def for_arguments(cls, args: TrainingArguments) -> Preemption:
        """The one that `enable_jit_checkpoint` and `jit_checkpoint_signals` ask for.

        Raises:
            ValueError: it is asked for outside of the main thread, where no signal arrives.
        """
        if not args.enable_jit_checkpoint:
            return cls()
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "enable_jit_checkpoint=True needs train() to be called in the main thread: Python hands signals to no "
                "other. Call it there, or leave enable_jit_checkpoint at False."
            )
        given = args.jit_checkpoint_signals or DEFAULT_ANNOUNCING_SIGNAL
        return cls([signal.Signals[name] for name in ([given] if isinstance(given, str) else given)])

    def start(self) -> None:
        """Take the signals; the first optimizer step comes next."""
        if not self.signals or self._earlier_handlers:
            return
        connect_hosts()
        self._answered_before = answer(self.signals)
        for number in self.signals:
            self._earlier_handlers[number] = signal.signal(number, self._note)

    def stop(self) -> None:
        """Give the signals back to what handled them before, unless a script has taken them in between."""
        for number, handler in self._earlier_handlers.items():
            # Each access makes another bound method.
            if signal.getsignal(number) == self._note and handler is not None:
                signal.signal(number, handler)
        if self._earlier_handlers:
            answer(self._answered_before)
        self._earlier_handlers = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self._received is not None
        if not again:
            self._received = signal.Signals(number)
        handler = self._earlier_handlers.get(signal.Signals(number))
        # That of Ctrl-C would end training now; it does when the user insists.
        if callable(handler) and (again or number != signal.SIGINT):
            handler(number, frame)

    def agree(self) -> None:
        """Find out whether any process received a signal to stop; every process calls this at the same places."""
        if self.signals and self.agreed is None:
            number = largest(int(self._received or 0))
            if number:
                self.agreed = signal.Signals(number)

    @contextmanager
    def breaking_off_evaluation(self, state: TrainerState) -> Iterator[None]:
        """Within it an evaluation ends early when a signal arrives, and leaves the numbers of training as they were."""
        if not self.signals:
            yield
            return
        random_states, entries = capture_random_states(), len(state.log_history)
        self._may_break_off = True
        try:
            yield
        except EvaluationBrokenOff:
            set_random_states(random_states)
            del state.log_history[entries:]
            self._evaluation_is_due = True
        finally:
            self._may_break_off = False

    def break_off_if_asked(self) -> None:
        """Called before each batch of an evaluation.

        Raises:
            EvaluationBrokenOff: training is to stop.
        """
        if self._may_break_off:
            self.agree()
            if self.agreed is not None:
                raise EvaluationBrokenOff

    def save_and_stop_if_asked(self, state: TrainerState, control: TrainerControl) -> None:
        """After a step was logged and evaluated: ask for its checkpoint, once, and for the end of training."""
        if self.agreed is None:
            return
        control.should_training_stop = True
        is_saved = self.saved_step == state.global_step
        if self.saved_step is None:
            logger.warning("%s: training saves and stops at optimizer step %d.", self.agreed.name, state.global_step)
        if not is_saved and (self._evaluation_is_due or control.should_evaluate):
            state.stateful_callbacks[BROKEN_OFF] = {"args": {}, "attributes": {"should_save": control.should_save}}
        control.should_evaluate = False
        control.should_save = not is_saved
        self.saved_step = state.global_step


def evaluation_to_make_up_for(state: TrainerState) -> dict[str, bool] | None:
    """Take out of a checkpoint's state the note that an evaluation was interrupted; None if there is none.

    Returns:
        the switches of the control, as they were when the evaluation was due.
    """
    note = (state.stateful_callbacks or {}).pop(BROKEN_OFF, None)
    return None if note is None else {"should_evaluate": True, **note["attributes"]}
