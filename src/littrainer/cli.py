"""The `littrainer` command, whose commands are modules with a function `main(arguments)` that returns a status."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from littrainer.commands.command_line import BAD_INPUT, BadInput, CommandParser, reject, run_quietly
from littrainer.runtime.version import __version__

# Command, and module in `littrainer.commands` -> its line in `littrainer --help`.
COMMANDS = {
    "run": "run a script or a module with littrainer's Trainer for transformers'",
    "check": "find out before a training what would fail late in it, how long it takes and what memory it needs",
    "explain": "show what training arguments turn into on Lightning",
    "report": "write the logs of trainings as an HTML page and a picture",
    "list": "list the trainings below a folder",
    "verify": "compare the numbers of a script with those of transformers' own Trainer",
    "compare": "show where two trainings differ, and what may be the reason",
    "env": "show what is installed here, for a bug report",
}
USAGE = "littrainer COMMAND ...\n       littrainer [-h] [--version]"
EPILOG = """\
`littrainer COMMAND --help` says more about a command.
Exit status: 0 success, 1 an error, 2 bad input, 130 Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; `run` may replace the process instead."""
    return run_quietly(lambda: _run_command(list(sys.argv[1:] if arguments is None else arguments)))


def _run_command(arguments: list[str]) -> int:
    parser = CommandParser("", "Run Transformers Trainer scripts on Lightning.", epilog=EPILOG, usage=USAGE)
    parser.add_argument("--version", action="version", version=f"littrainer {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=argparse.ArgumentParser)
    for name, purpose in COMMANDS.items():
        commands.add_parser(name, help=purpose)
    if not arguments:
        # Like argparse for a missing command.
        parser.print_help(sys.stderr)
        return BAD_INPUT
    name, *rest = arguments
    if name in COMMANDS:
        try:
            return importlib.import_module(f"littrainer.commands.{name}").main(rest)
        except BadInput as error:
            return reject(name, error)
    if name.startswith("-"):
        parser.parse_args(arguments)
    if name.endswith(".py") or os.path.isfile(name):
        parser.error(f"to run a script, put `run` before it: littrainer run {name}")
    from littrainer.arguments.did_you_mean import suggest_name

    parser.error(f"no command {name!r}; {suggest_name(name, COMMANDS)}")
