"""Signals during a training: saving and stopping at an optimizer step, and two lines instead of a traceback at Ctrl-C.

A signal that the process is about to be ended is noted when it arrives. At the next step boundary all processes agree
on it, training saves a checkpoint of that step, unless it has just saved one, and stops; `train()` returns. An
evaluation is interrupted, since the time left is short; the checkpoint says so, and a training that resumes from it
makes up for it.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from littrainer.arguments.fields import DEFAULT_ANNOUNCING_SIGNAL
from littrainer.checkpoint.layout import checkpoint_folder, checkpoint_step
from littrainer.data.resume.rng import get_rng_states, set_rng_states
from littrainer.data.workers import set_handled_signals
from littrainer.distributed.collectives import all_reduce_max, connect_hosts
from littrainer.distributed.environment import COMMAND, is_launched
from littrainer.loop.step_policy import StepPolicy
from littrainer.redirection.redirect import is_installed
from littrainer.runtime.tracebacks import print_instead, should_show_full_tracebacks

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerControl, TrainerState


logger = logging.getLogger(__name__)

# The entry among the states of callbacks in trainer_state.json; transformers passes over names it does not know.
INTERRUPTED_EVALUATION = "EvaluationBrokenOff"
OPTION = "--resume_from_checkpoint"


def make_jit_checkpoint_callbacks(trainer: Any) -> list[Any]:
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


class EvaluationInterrupted(BaseException):
    """Ends an evaluation between two batches; no Exception, so that a script's `except Exception` lets it pass."""


class Preemption(StepPolicy):
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
        self._handled_before: Sequence[signal.Signals] = ()
        self._can_interrupt = False
        self._evaluation_is_due = False

    @classmethod
    def create(cls, args: TrainingArguments) -> Preemption:
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
        self._handled_before = set_handled_signals(self.signals)
        for number in self.signals:
            self._earlier_handlers[number] = signal.signal(number, self._note)

    def stop(self) -> None:
        """Give the signals back to what handled them before, unless a script has taken them in between."""
        for number, handler in self._earlier_handlers.items():
            # Each access makes another bound method.
            if signal.getsignal(number) == self._note and handler is not None:
                signal.signal(number, handler)
        if self._earlier_handlers:
            set_handled_signals(self._handled_before)
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
            number = all_reduce_max(int(self._received or 0))
            if number:
                self.agreed = signal.Signals(number)

    def on_step_end(self, state: TrainerState, control: TrainerControl, is_epoch_end: bool) -> None:
        """Let the processes agree on a signal; at an epoch's last step they do so when the epoch ends."""
        if not is_epoch_end:
            self.agree()

    @contextmanager
    def interruptible_evaluation(self, state: TrainerState) -> Iterator[None]:
        """Within it an evaluation ends early when a signal arrives, and leaves the numbers of training as they were."""
        if not self.signals:
            yield
            return
        random_states, entries = get_rng_states(), len(state.log_history)
        self._can_interrupt = True
        try:
            yield
        except EvaluationInterrupted:
            set_rng_states(random_states)
            del state.log_history[entries:]
            self._evaluation_is_due = True
        finally:
            self._can_interrupt = False

    def raise_if_preempted(self) -> None:
        """Called before each batch of an evaluation.

        Raises:
            EvaluationInterrupted: training is to stop.
        """
        if self._can_interrupt:
            self.agree()
            if self.agreed is not None:
                raise EvaluationInterrupted

    def request_save_and_stop(self, state: TrainerState, control: TrainerControl) -> None:
        """After a step was logged and evaluated: ask for its checkpoint, once, and for the end of training."""
        if self.agreed is None:
            return
        control.should_training_stop = True
        is_saved = self.saved_step == state.global_step
        if self.saved_step is None:
            logger.warning("%s: training saves and stops at optimizer step %d.", self.agreed.name, state.global_step)
        if not is_saved and (self._evaluation_is_due or control.should_evaluate):
            switches = {"should_save": control.should_save}
            state.stateful_callbacks[INTERRUPTED_EVALUATION] = {"args": {}, "attributes": switches}
        control.should_evaluate = False
        control.should_save = not is_saved
        self.saved_step = state.global_step


def pop_interrupted_evaluation(state: TrainerState) -> dict[str, bool] | None:
    """Take out of a checkpoint's state the note that an evaluation was interrupted; None if there is none.

    Returns:
        the switches of the control, as they were when the evaluation was due.
    """
    note = (state.stateful_callbacks or {}).pop(INTERRUPTED_EVALUATION, None)
    return None if note is None else {"should_evaluate": True, **note["attributes"]}


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


@contextmanager
def report_ctrl_c(args: TrainingArguments, state: Callable[[], TrainerState]) -> Iterator[None]:
    """While a training runs: let a Ctrl-C that ends the program be reported in two lines.

    Parameters:
        state: returns the state of the training.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if not should_show_full_tracebacks():
            print_instead(error, describe_interruption(args, state()) if args.process_index == 0 else [])
        raise


def describe_interruption(args: TrainingArguments, state: TrainerState) -> list[str]:
    """Return two lines: the step with the last checkpoint, and how to resume."""
    steps = [checkpoint_step(path) for path in Path(args.output_dir).glob("*")]
    # An earlier training may have left later ones.
    step = max((step for step in steps if step is not None and step <= state.global_step), default=None)
    where = f"Interrupted at optimizer step {state.global_step} of {state.max_steps}."
    if step is None:
        return [f"{where} No checkpoint has been saved.", f"To start again: {resume_command()}"]
    folder = checkpoint_folder(args.output_dir, step)
    return [f"{where} The last checkpoint is {folder}.", f"To resume: {resume_command(str(folder))}"]


def resume_command(checkpoint: str | None = None) -> str:
    """Return the command that started this program; with a checkpoint, the one that resumes from it.

    A script that does not read the option has to be changed: then it is the call of `train()`.
    """
    if checkpoint is not None and not _takes_option():
        return f"call trainer.train(resume_from_checkpoint={checkpoint!r})"
    if COMMAND not in os.environ and is_launched():
        # Another launcher's command line is not known here.
        return "start the same command" + (f" with {OPTION} {shlex.quote(checkpoint)}" if checkpoint else "")
    words = shlex.split(os.environ[COMMAND]) if COMMAND in os.environ else sys.orig_argv
    if checkpoint is None:
        return shlex.join(words)
    # A resumed training has the option already.
    place = words.index(OPTION) if OPTION in words else len(words)
    return shlex.join([*words[:place], OPTION, checkpoint, *words[place + 2 :]])


def _takes_option() -> bool:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    with suppress(OSError, UnicodeDecodeError, TypeError):
        source = Path(main).read_text("utf-8")  # type: ignore[arg-type]
        return "Parser" in source and re.search(r"args\.resume_from_checkpoint\b", source) is not None
    return False
