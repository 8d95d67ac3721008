"""Signals during a training: save and stop at an optimizer step, and two lines instead of a traceback at Ctrl-C."""

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
from littrainer.distributed.environment import COMMAND, get_command, is_launched
from littrainer.loop.step_policy import StepPolicy
from littrainer.redirection.redirect import is_installed
from littrainer.runtime.tracebacks import print_instead, should_show_full_tracebacks

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerControl, TrainerState


logger = logging.getLogger(__name__)

# Entry among the callbacks' states in trainer_state.json, where transformers ignores unknown names.
INTERRUPTED_EVALUATION = "EvaluationBrokenOff"
OPTION = "--resume_from_checkpoint"


def make_jit_checkpoint_callbacks(args: TrainingArguments, trainer: object) -> list[Any]:
    """Return transformers' own callback for `enable_jit_checkpoint`, if the redirection of transformers is installed.

    Scripts may set `is_checkpoint_requested` of the callback's manager to save and stop. `Preemption` handles the
    signals in place of the callback.
    """
    if args.enable_jit_checkpoint and is_installed() and "transformers" in sys.modules:
        # transformers 4 has no such module.
        with suppress(ImportError):
            module: Any = import_module("transformers.trainer_jit_checkpoint")
            callback = module.JITCheckpointCallback()
            callback.trainer = trainer
            callback.jit_manager = module.CheckpointManager(trainer)
            return [callback]
    return []


class EvaluationInterrupted(BaseException):
    """Ends an evaluation between two batches; a BaseException, so that no script's `except Exception` catches it."""


class Preemption(StepPolicy):
    """Preemption signals, which save and stop a training at a step boundary.

    An interrupted evaluation is rerun by the training that resumes.

    Attributes:
        stop_signal: the signal that stops the training, the same in all processes; None before `sync_signal` finds one.
        saved_step: the optimizer step that was saved for the signal.
    """

    def __init__(self, signals: Sequence[signal.Signals] = ()):
        self.signals = tuple(signals)
        self.stop_signal: signal.Signals | None = None
        self.saved_step: int | None = None
        self._received: signal.Signals | None = None
        self._earlier_handlers: dict[signal.Signals, Any] = {}
        self._handled_before: Sequence[signal.Signals] = ()
        self._can_interrupt = False
        self._is_evaluation_due = False

    @classmethod
    def create(cls, args: TrainingArguments) -> Preemption:
        """Return the policy for `enable_jit_checkpoint`, or raise a ValueError outside of the main thread."""
        if not args.enable_jit_checkpoint:
            return cls()
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "enable_jit_checkpoint=True needs train() to be called in the main thread: Python hands signals to no "
                "other. Call it there, or leave enable_jit_checkpoint at False."
            )
        names = args.jit_checkpoint_signals or DEFAULT_ANNOUNCING_SIGNAL
        return cls([signal.Signals[name] for name in ([names] if isinstance(names, str) else names)])

    def start(self) -> None:
        if not self.signals or self._earlier_handlers:
            return
        connect_hosts()
        self._handled_before = set_handled_signals(self.signals)
        for number in self.signals:
            self._earlier_handlers[number] = signal.signal(number, self._on_signal)

    def stop(self) -> None:
        """Restore the earlier handlers, except where a script has replaced this handler."""
        for number, handler in self._earlier_handlers.items():
            # `==`, since each access makes a new bound method.
            if signal.getsignal(number) == self._on_signal and handler is not None:
                signal.signal(number, handler)
        if self._earlier_handlers:
            set_handled_signals(self._handled_before)
        self._earlier_handlers = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_repeated = self._received is not None
        if not is_repeated:
            self._received = signal.Signals(number)
        handler = self._earlier_handlers.get(signal.Signals(number))
        # The handler of Ctrl-C raises KeyboardInterrupt: chain to it only for a second signal.
        if callable(handler) and (is_repeated or number != signal.SIGINT):
            handler(number, frame)

    def sync_signal(self) -> None:
        """Synchronize the received signals; a collective."""
        if self.signals and self.stop_signal is None:
            number = all_reduce_max(int(self._received or 0))
            if number:
                self.stop_signal = signal.Signals(number)

    def on_step_end(self, state: TrainerState, control: TrainerControl, is_epoch_end: bool) -> None:
        """Synchronize signals, except after an epoch's last step, since the end of the epoch synchronizes them."""
        if not is_epoch_end:
            self.sync_signal()

    @contextmanager
    def interruptible_evaluation(self, state: TrainerState) -> Iterator[None]:
        """Run an evaluation; if a signal interrupts it, restore random states and the log history."""
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
            self._is_evaluation_due = True
        finally:
            self._can_interrupt = False

    def raise_if_preempted(self) -> None:
        """Raise EvaluationInterrupted if a process has received a signal."""
        if self._can_interrupt:
            self.sync_signal()
            if self.stop_signal is not None:
                raise EvaluationInterrupted

    def request_save_and_stop(self, state: TrainerState, control: TrainerControl) -> None:
        """Raise the flags for a checkpoint and the end of training, after log and evaluation of a step."""
        if self.stop_signal is None:
            return
        control.should_training_stop = True
        is_saved = self.saved_step == state.global_step
        if self.saved_step is None:
            logger.warning(
                "%s: training saves and stops at optimizer step %d.", self.stop_signal.name, state.global_step
            )
        if not is_saved and (self._is_evaluation_due or control.should_evaluate):
            switches = {"should_save": control.should_save}
            state.stateful_callbacks[INTERRUPTED_EVALUATION] = {"args": {}, "attributes": switches}
        control.should_evaluate = False
        control.should_save = not is_saved
        self.saved_step = state.global_step


def pop_interrupted_evaluation(state: TrainerState) -> dict[str, bool] | None:
    """Remove and return the control's flags for an interrupted evaluation, or None."""
    entry = (state.stateful_callbacks or {}).pop(INTERRUPTED_EVALUATION, None)
    return None if entry is None else {"should_evaluate": True, **entry["attributes"]}


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


@contextmanager
def report_ctrl_c(args: TrainingArguments, state: Callable[[], TrainerState]) -> Iterator[None]:
    """Report Ctrl-C in a block in two lines."""
    try:
        yield
    except KeyboardInterrupt as error:
        if not should_show_full_tracebacks():
            print_instead(error, describe_interruption(args, state()) if args.process_index == 0 else [])
        raise


def describe_interruption(args: TrainingArguments, state: TrainerState) -> list[str]:
    steps = [checkpoint_step(path) for path in Path(args.output_dir).glob("*")]
    # Later checkpoints are from an earlier training.
    step = max((step for step in steps if step is not None and step <= state.global_step), default=None)
    where = f"Interrupted at optimizer step {state.global_step} of {state.max_steps}."
    if step is None:
        return [f"{where} No checkpoint has been saved.", f"To start again: {resume_command()}"]
    folder = checkpoint_folder(args.output_dir, step)
    return [f"{where} The last checkpoint is {folder}.", f"To resume: {resume_command(str(folder))}"]


def resume_command(checkpoint: str | None = None) -> str:
    """Return the command that starts this program, or resumes from a checkpoint.

    For a script that does not parse the option, return the call of `train()`.
    """
    if checkpoint is not None and not _parses_option():
        return f"call trainer.train(resume_from_checkpoint={checkpoint!r})"
    if COMMAND not in os.environ and is_launched():
        return "start the same command" + (f" with {OPTION} {shlex.quote(checkpoint)}" if checkpoint else "")
    command = get_command()
    if checkpoint is None:
        return shlex.join(command)
    index = command.index(OPTION) if OPTION in command else len(command)
    return shlex.join([*command[:index], OPTION, checkpoint, *command[index + 2 :]])


def _parses_option() -> bool:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    with suppress(OSError, UnicodeDecodeError, TypeError):
        source = Path(main).read_text("utf-8")  # type: ignore[arg-type]
        return "Parser" in source and re.search(r"args\.resume_from_checkpoint\b", source) is not None
    return False
