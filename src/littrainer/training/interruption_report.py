"""What Ctrl-C prints instead of a traceback: the step, the last checkpoint, and the command that resumes.

The script still gets the KeyboardInterrupt, and may catch it; only one that ends the program is reported.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from littrainer.checkpoint.layout import checkpoint_folder, checkpoint_step
from littrainer.distributed.environment import COMMAND, is_launched
from littrainer.errors.tracebacks import shows_everything

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerState

# Set on a KeyboardInterrupt: the lines to print, none in all processes but the first.
REPORT = "_interruption_report"
OPTION = "--resume_from_checkpoint"
_has_hook = False


@contextmanager
def reported_interruption(args: TrainingArguments, state: Callable[[], TrainerState]) -> Iterator[None]:
    """While a training runs: let a Ctrl-C that ends the program be reported in two lines.

    Parameters:
        state: returns the state of the training.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if not shows_everything():
            setattr(error, REPORT, report(args, state()) if args.process_index == 0 else [])
            _set_hook()
        raise


def report(args: TrainingArguments, state: TrainerState) -> list[str]:
    """Return two lines: the step with the last checkpoint, and how to resume."""
    steps = [checkpoint_step(path) for path in Path(args.output_dir).glob("*")]
    # An earlier training may have left later ones.
    step = max((step for step in steps if step is not None and step <= state.global_step), default=None)
    where = f"Interrupted at optimizer step {state.global_step} of {state.max_steps}."
    if step is None:
        return [f"{where} No checkpoint has been saved.", f"To start again: {command()}"]
    folder = checkpoint_folder(args.output_dir, step)
    return [f"{where} The last checkpoint is {folder}.", f"To resume: {command(str(folder))}"]


def command(checkpoint: str | None = None) -> str:
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


def _set_hook() -> None:
    global _has_hook
    if _has_hook:
        return
    _has_hook = True
    earlier_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        lines = _lines_of(error)
        if lines is None:
            earlier_hook(kind, error, trace)
            return
        if not sys.flags.inspect:
            # Nothing is left to be saved: another Ctrl-C ends the program at once.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Other hooks tell trackers and processes of the error; the traceback at their end is not wanted.
        with suppress(Exception), redirect_stderr(io.StringIO()):
            earlier_hook(kind, error, trace)
        print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr, flush=True)

    sys.excepthook = hook


def _lines_of(error: BaseException | None) -> list[str] | None:
    # Another Ctrl-C may have come while the first one ended the training.
    while isinstance(error, KeyboardInterrupt):
        if hasattr(error, REPORT):
            return list(getattr(error, REPORT))
        error = error.__context__
    return None
