"""The command `littrainer check`: a script up to its first `train()`, and a check of that training instead of it.

It starts processes as `littrainer run` does; in each of them this module runs the script.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from littrainer.commands import run
from littrainer.commands.command_line import complain

DESCRIPTION = """\
Run a script up to its first train(), and check that training in a temporary folder: rows, the longest batch, an
evaluation, a save, a resume. Prints what passed, what would fail and when, and what time and memory the whole takes."""
WOULD_FAIL = 1


class TrainingChecked(BaseException):
    """Ends the script, past its `except Exception`; its argument is what the check has found."""


def main(words: Sequence[str]) -> int:
    """Run the command on what follows `littrainer check`; returns the exit status, as `run.main` does."""
    return run.start("check", run.build_parser("littrainer check", DESCRIPTION), words, ["-m", __spec__.name])


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
    try:
        with _training_replaced_by_check(name), contextlib.redirect_stdout(sys.stderr):
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
    except TrainingChecked as checked:
        (report,) = checked.args
    else:
        return complain("check", f"{name} ended without a call of train(), so there is nothing to check")
    if isinstance(report, Exception):
        return complain("check", f"this training cannot be checked: {type(report).__name__}: {report}")
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0 or not report.ok:
        print(report if rank == 0 else f"process {rank}: {report}", flush=True)
    if report.is_broken_off:
        # Other processes wait in a collective call, and so would the end of this one.
        os._exit(WOULD_FAIL)
    return 0 if report.ok else WOULD_FAIL


@contextlib.contextmanager
def _training_replaced_by_check(name: str) -> Iterator[None]:
    """While the block runs the first `train()` is checked and ends it, and making a Trainer leaves nothing behind."""
    from littrainer import trainer as module
    from littrainer.check.checking import TrainingCheck

    kind: Any = module.Trainer
    train, make_repository, make_output_dir = kind.train, kind.init_hf_repo, module.make_output_dir
    made: list[Path] = []

    def check_instead(self: Any, *args: Any, trial: Any = None, **keywords: Any) -> NoReturn:
        kind.train = train
        try:
            if trial is not None:
                raise NotImplementedError("it is a trial of a search; let the script call train().")
            training = f"the training that {_calling_line(name)} begins; what the script does after it was not run"
            found: Any = TrainingCheck(self, training, ends_afterwards=True).run()
        except Exception as error:
            found = error
        raise TrainingChecked(found)

    def note_output_dir(folder: Any) -> None:
        path = Path(folder).absolute()
        made.extend(one for one in (path, *path.parents) if not one.exists())
        make_output_dir(folder)

    kind.train, kind.init_hf_repo = check_instead, lambda *_, **__: None
    module.make_output_dir = note_output_dir
    try:
        yield
    finally:
        kind.train, kind.init_hf_repo, module.make_output_dir = train, make_repository, make_output_dir
        for folder in made:
            # What the script itself has put there stays.
            with contextlib.suppress(OSError):
                folder.rmdir()


def _calling_line(name: str) -> str:
    frame: Any = sys._getframe()
    script = os.path.abspath(name)
    while frame is not None:
        if os.path.abspath(frame.f_code.co_filename) == script:
            return f"{os.path.basename(name)}, line {frame.f_lineno},"
        frame = frame.f_back
    return name


if __name__ == "__main__":
    sys.exit(check_program(sys.argv[1:]))
