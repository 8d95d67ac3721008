"""Runs a script up to its first Trainer and explains that: `python -m littrainer.explain.in_script WISH SCRIPT ARGS`.

A process of its own, for the script's imports and settings stay in it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from littrainer.commands.command_parser import complain
from littrainer.commands.ending import quietly
from littrainer.explain.stand_ins import with_folder


class TrainerReached(BaseException):
    """Stops the script, past its `except Exception`.

    Parameters:
        text: what is to be printed.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text


def main(words: list[str]) -> int:
    """Run the script in `words` and print what its first Trainer turns into; returns the exit status."""
    wish, script, *rest = words
    options = json.loads(wish)
    sys.argv = [script, *rest]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        with contextlib.redirect_stdout(sys.stderr), stopping_at_a_trainer(_renderer(options, script)):
            runpy.run_path(script, run_name="__main__")
    except TrainerReached as reached:
        print(reached.text, end="")
        return 0
    return complain("explain", f"{script} ended without making a Trainer; nothing to explain")


def _renderer(options: dict[str, Any], script: str) -> Callable[[Any, Any], str]:
    from littrainer.explain.program import Source, program
    from littrainer.explain.report import explanation

    if not options["as_code"]:
        return explanation
    source, origin = Source(**options["source"]), f"the arguments of {os.path.basename(script)}"
    return lambda trainer, args: program(args, source, origin, trainer)


@contextlib.contextmanager
def stopping_at_a_trainer(describe: Callable[[Any, Any], str]) -> Iterator[None]:
    """Let the first Trainer be made, without a trace on the disk, and stop there with its description.

    Parameters:
        describe: takes the Trainer and the arguments it was given.
    """
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.trainer import Trainer

    original: Any = Trainer.__init__
    signature = inspect.signature(original)

    def stop(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments.get("args") or TrainingArguments("tmp_trainer")
        with tempfile.TemporaryDirectory() as folder:
            bound.arguments["args"] = with_folder(given, folder)
            original(*bound.args, **bound.kwargs)
            text = describe(self, given)
        raise TrainerReached(text)

    Trainer.__init__ = stop  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.__init__ = original  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(quietly(lambda: main(sys.argv[1:])))
