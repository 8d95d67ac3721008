"""The command `littrainer check`: runs a script up to its first `train()`, and checks that training instead."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from littrainer.commands import run
from littrainer.commands.command_line import ProgramParser, reject
from littrainer.commands.output_dirs import remove_output_dirs
from littrainer.commands.recorded_training import call_before_lightning_fit, end_process, run_program

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
    from littrainer.check.findings import format_error, make_finding
    from littrainer.loop.checks import CHECKED_PROCESS
    from littrainer.redirection.redirect import install
    from littrainer.tracking.base import TrackerCallback
    from littrainer.trainer import Trainer

    install()
    trainer_class: Any = Trainer
    name, train, page = program[program[0] == "-m"], trainer_class.train, sys.stdout
    exit_process, process_id, checks = os._exit, os.getpid(), list[TrainingCheck]()
    os.environ[CHECKED_PROCESS] = str(process_id)

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
            checks.append(TrainingCheck(trained, f"{training}; what the script does after it was not run"))
            for error in dir_errors:
                checks[-1].findings.append(
                    make_finding("output_dir", "", format_error(error), "when a Trainer is made")
                )
            report = checks[-1].run(True)
        except (Exception, SystemExit) as error:
            status = reject("check", f"this training cannot be checked: {type(error).__name__}: {error}")
        else:
            status, is_interrupted = 0 if report.ok else WOULD_FAIL, report.is_interrupted
            if trained.args.process_index == 0:
                print(report, file=page, flush=True)
            elif is_interrupted:
                print(f"process {trained.args.process_index}:", *report.failures, sep="\n", file=page, flush=True)
        folders.close()
        vars(os)["_exit"] = exit_process
        # Exit functions might wait for other processes that are in a collective call.
        (exit_process if is_interrupted else end_process)(status)

    def stop_lightning_training(*_: Any) -> None:
        # A check trains with lightning.Trainer too.
        if trainer_class.train is check_instead:
            folders.close()
            vars(os)["_exit"] = exit_process
            advice = "lightning.Trainer(fast_dev_run=True) tries its steps"
            end_process(reject("check", f"{name} trains with lightning.Trainer, whose fit was not run; {advice}"))

    def exit_with_message(status: int) -> None:
        if os.getpid() == process_id:
            if checks and threading.current_thread() is threading.main_thread():
                raise SystemExit(f"os._exit({status!r})")
            status = reject("check", f"{name} called os._exit({status!r}), so nothing is known of the training")
            folders.close()
            for check in checks:
                shutil.rmtree(check.folder, ignore_errors=True)
        exit_process(status)

    # A script that calls os._exit would silently end the check with its status.
    vars(os)["_exit"] = exit_with_message
    trainer_class.train = trainer_class.check = check_instead
    call_before_lightning_fit(stop_lightning_training)
    # Evaluations before the training must not start trackers.
    TrackerCallback.has_failed = True
    with contextlib.ExitStack() as folders, contextlib.redirect_stdout(sys.stderr):
        dir_errors = folders.enter_context(remove_output_dirs())
        try:
            run_program(program)
        except SystemExit as end:
            if end.code:
                raise
    return reject("check", f"{name} ended without a call of train(), so there is nothing to check")


if __name__ == "__main__":
    sys.exit(check_program(sys.argv[1:]))
