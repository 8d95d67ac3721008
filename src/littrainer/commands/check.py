"""The command `littrainer check`: a script up to its first `train()`, and a check of that training instead of it.

It starts processes as `littrainer run` does; in each of them this module runs the script.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from littrainer.commands import run
from littrainer.commands.command_line import complain
from littrainer.commands.recorded_training import end_process, run_program

DESCRIPTION = """\
Run a script up to its first train(), and check that training in a temporary folder: rows, the longest batch, an
evaluation, a save, a resume. Prints what passed, what would fail and when, and what time and memory the whole takes."""
WOULD_FAIL = 1


def main(words: Sequence[str]) -> int:
    """Run the command on what follows `littrainer check`; returns the exit status, as `run.main` does."""
    # A check that finds something is not started again.
    parser = run.build_parser("littrainer check", DESCRIPTION, "--restarts", "--hang-timeout")
    return run.start("check", parser, words, ["-m", __spec__.name])


def check_program(program: Sequence[str]) -> int:
    """Run a script, or `-m` and a module, with its arguments, up to its first `train()`; check that, and end.

    Returns:
        2, if the script has ended without a training.
    """
    from littrainer import trainer as module
    from littrainer.check.checking import TrainingCheck
    from littrainer.redirection.redirect import install
    from littrainer.tracking.base import TrackerCallback

    install()
    kind: Any = module.Trainer
    name, train, make_output_dir = program[program[0] == "-m"], kind.train, module.make_output_dir
    page, made = sys.stdout, list[Path]()

    def check_instead(self: Any, *given: Any, trial: Any = None, **keywords: Any) -> None:
        kind.train, is_broken_off = train, False
        stack, script = traceback.walk_stack(sys._getframe()), os.path.abspath(name)
        lines = [f", line {line}," for frame, line in stack if os.path.abspath(frame.f_code.co_filename) == script]
        training = f"the training that {os.path.basename(name)}{''.join(lines[:1])} begins"
        if given or keywords.get("resume_from_checkpoint"):
            training += ", from its first step and not from a checkpoint"
        try:
            if trial is not None:
                raise NotImplementedError("it is a trial of a search; let the script call train().")
            report = TrainingCheck(self, f"{training}; what the script does after it was not run").run(True)
        except Exception as error:
            status = complain("check", f"this training cannot be checked: {type(error).__name__}: {error}")
        else:
            status, is_broken_off = 0 if report.ok else WOULD_FAIL, report.is_broken_off
            if self.args.process_index == 0:
                print(report, file=page, flush=True)
            elif is_broken_off:
                print(f"process {self.args.process_index}:", *report.failures, sep="\n", file=page, flush=True)
        remove_folders()
        # Other processes may wait in a collective call, and so would functions that end this one.
        (os._exit if is_broken_off else end_process)(status)

    def note_output_dir(folder: Any) -> None:
        path = Path(folder).absolute()
        made.extend(one for one in (path, *path.parents) if not one.exists())
        make_output_dir(folder)

    def remove_folders() -> None:
        for folder in made:
            # What the script itself has put there stays.
            with contextlib.suppress(OSError):
                folder.rmdir()

    kind.train = kind.check = check_instead
    kind.init_hf_repo, module.make_output_dir = lambda *_, **__: None, note_output_dir
    # An evaluation before the training starts none either.
    TrackerCallback.has_failed = True
    try:
        with contextlib.redirect_stdout(sys.stderr):
            run_program(program)
    finally:
        remove_folders()
    return complain("check", f"{name} ended without a call of train(), so there is nothing to check")


if __name__ == "__main__":
    sys.exit(check_program(sys.argv[1:]))
