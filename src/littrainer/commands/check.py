"""The command `littrainer check`: runs a script up to its first `train()`, and checks that training instead."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from littrainer.commands import run
from littrainer.commands.command_line import ProgramParser, reject
from littrainer.commands.output_dirs import remove_output_dirs
from littrainer.commands.recorded_training import end_process, run_program

DESCRIPTION = """\
Run a script up to its first train(), and check that training in a temporary folder: rows, the longest batch, an
evaluation, a save, a resume. Prints what passed, what would fail and when, and what time and memory the whole takes."""
WOULD_FAIL = 1


def main(words: Sequence[str]) -> int:
    return run.start("check", ProgramParser("check", DESCRIPTION), words, ["-m", __spec__.name])


def check_program(program: Sequence[str]) -> int:
    """Run a script (or `-m` and a module) up to its first `train()`, check it, and end the process.

    Returns:
        2, if the script ended without a training.
    """
    from littrainer.check.checking import TrainingCheck
    from littrainer.loop.checks import CHECKED_PROCESS
    from littrainer.redirection.redirect import install
    from littrainer.tracking.base import TrackerCallback
    from littrainer.trainer import Trainer

    install()
    trainer_class: Any = Trainer
    name, train, page = program[program[0] == "-m"], trainer_class.train, sys.stdout
    os.environ[CHECKED_PROCESS] = str(os.getpid())

    def check_instead(trained: Trainer, *args: Any, trial: Any = None, **keywords: Any) -> None:
        trainer_class.train, is_interrupted = train, False
        frames, script = traceback.extract_stack(), os.path.abspath(name)
        lines = [f", line {frame.lineno}," for frame in frames if os.path.abspath(frame.filename) == script]
        training = f"the training that {os.path.basename(name)}{''.join(lines[-1:])} begins"
        if args or keywords.get("resume_from_checkpoint"):
            training += ", from its first step and not from a checkpoint"
        try:
            if trial is not None:
                raise NotImplementedError("it is a trial of a search; let the script call train().")
            report = TrainingCheck(trained, f"{training}; what the script does after it was not run").run(True)
        except (Exception, SystemExit) as error:
            status = reject("check", f"this training cannot be checked: {type(error).__name__}: {error}")
        else:
            status, is_interrupted = 0 if report.ok else WOULD_FAIL, report.is_interrupted
            if trained.args.process_index == 0:
                print(report, file=page, flush=True)
            elif is_interrupted:
                print(f"process {trained.args.process_index}:", *report.failures, sep="\n", file=page, flush=True)
        folders.close()
        # Exit functions might wait for other processes that are in a collective call.
        (os._exit if is_interrupted else end_process)(status)

    trainer_class.train = trainer_class.check = check_instead
    # Evaluations before the training must not start trackers.
    TrackerCallback.has_failed = True
    with contextlib.ExitStack() as folders, contextlib.redirect_stdout(sys.stderr):
        folders.enter_context(remove_output_dirs())
        try:
            run_program(program)
        except SystemExit as end:
            if end.code:
                raise
    return reject("check", f"{name} ended without a call of train(), so there is nothing to check")


if __name__ == "__main__":
    sys.exit(check_program(sys.argv[1:]))
