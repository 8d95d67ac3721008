"""The command `littrainer check`: a script up to its first `train()`, and a check of that training instead of it.

It starts processes as `littrainer run` does; in each of them this module runs the script.
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from littrainer.commands import run
from littrainer.commands.command_line import complain

DESCRIPTION = """\
Run a script up to its first train(), and check that training in a temporary folder: rows, the longest batch, an
evaluation, a save, a resume. Prints what passed, what would fail and when, and what time and memory the whole takes."""
WOULD_FAIL = 1
# What a script may call in a `finally`, or after an `except` for all errors: each ends it again.
WAYS_ON = ("train", "check", "evaluate", "predict", "save_model", "save_state", "save_metrics", "push_to_hub")


class TrainingChecked(BaseException):
    """Ends the script, past its `except Exception`; its argument is what the check has found."""


def main(words: Sequence[str]) -> int:
    """Run the command on what follows `littrainer check`; returns the exit status, as `run.main` does."""
    # A check that finds something is not started again.
    parser = run.build_parser("littrainer check", DESCRIPTION, "--restarts", "--hang-timeout")
    return run.start("check", parser, words, ["-m", __spec__.name])


def check_program(program: Sequence[str]) -> int:
    """Run a script, or `-m` and a module, with its arguments, up to its first `train()`, and check that.

    Returns:
        0 if nothing would fail, 1 if something would, 2 if nothing could be checked.
    """
    from littrainer.redirection.redirect import install

    install()
    is_module = program[0] == "-m"
    name, *_ = sys.argv = list(program[is_module:])
    if not is_module:
        sys.path[0] = os.path.dirname(os.path.abspath(name))
    made = _replace_training_by_check(name)
    start = functools.partial(runpy.run_module, alter_sys=True) if is_module else runpy.run_path
    try:
        with contextlib.redirect_stdout(sys.stderr):
            start(name, run_name="__main__")
    except TrainingChecked as checked:
        (report,) = checked.args
    else:
        return complain("check", f"{name} ended without a call of train(), so there is nothing to check")
    finally:
        for folder in made:
            # What the script itself has put there stays.
            with contextlib.suppress(OSError):
                folder.rmdir()
    if isinstance(report, Exception):
        return complain("check", f"this training cannot be checked: {type(report).__name__}: {report}")
    if os.environ.get("RANK", "0") == "0":
        print(report, flush=True)
    elif report.is_broken_off:
        print(f"process {os.environ['RANK']}:", *report.failures, sep="\n", flush=True)
    if report.is_broken_off:
        # Other processes wait in a collective call, and so would the end of this one.
        os._exit(WOULD_FAIL)
    return 0 if report.ok else WOULD_FAIL


def _replace_training_by_check(name: str) -> list[Path]:
    """Let the first `train()` be a check, which ends the script; return the list of folders that Trainers make."""
    from littrainer import trainer as module
    from littrainer.check.checking import TrainingCheck

    kind: Any = module.Trainer
    train, make_output_dir, made = kind.train, module.make_output_dir, list[Path]()

    def check_instead(self: Any, *given: Any, trial: Any = None, **keywords: Any) -> NoReturn:
        kind.train = train
        stack, script = traceback.walk_stack(sys._getframe()), os.path.abspath(name)
        lines = [f", line {line}," for frame, line in stack if os.path.abspath(frame.f_code.co_filename) == script]
        training = f"the training that {os.path.basename(name)}{''.join(lines[:1])} begins"
        if given or keywords.get("resume_from_checkpoint"):
            training += ", from its first step and not from a checkpoint"
        try:
            if trial is not None:
                raise NotImplementedError("it is a trial of a search; let the script call train().")
            found: Any = TrainingCheck(self, f"{training}; what the script does after it was not run").run(True)
        except Exception as error:
            found = error

        def end_script(*_: Any, **__: Any) -> NoReturn:
            raise TrainingChecked(found)

        for method in WAYS_ON:
            setattr(kind, method, end_script)
        end_script()

    def note_output_dir(folder: Any) -> None:
        path = Path(folder).absolute()
        made.extend(one for one in (path, *path.parents) if not one.exists())
        make_output_dir(folder)

    kind.train = kind.check = check_instead
    kind.init_hf_repo, module.make_output_dir = lambda *_, **__: None, note_output_dir
    return made


if __name__ == "__main__":
    sys.exit(check_program(sys.argv[1:]))
