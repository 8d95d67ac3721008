"""The `littrainer` command.

Each of its commands is a module with `build_parser()` and `main(words)`, which returns the exit status.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from littrainer.commands.command_line import BAD_INPUT, CommandParser, quietly
from littrainer.errors.version import __version__

# Command, and module in `littrainer.commands` -> what `littrainer --help` says about it.
COMMANDS = {
    "run": "run a script or a module with littrainer's Trainer for transformers'",
    "explain": "show what training arguments turn into on Lightning",
    "report": "write the logs of trainings as an HTML page and a picture",
    "verify": "compare the numbers of a script with those of transformers' own Trainer",
    "compare": "show where two trainings differ, and what may be the reason",
    "env": "show what is installed here, for a bug report",
}
USAGE = "littrainer COMMAND ...\n       littrainer [-h] [--version]"
EPILOG = (
    "`littrainer COMMAND --help` says more about a command. "
    + "Exit status: 0 success, 1 an error, 2 bad input, 130 Ctrl-C."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the command's name; by default the arguments of this process.

    Returns:
        The exit status. `run` does not return if the operating system can replace a process by another.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    return quietly(lambda: _answer(given))


def build_parser() -> CommandParser:
    """Return the parser of the words before a command."""
    parser = CommandParser(
        "littrainer", description="Run Transformers Trainer scripts on Lightning.", epilog=EPILOG, usage=USAGE
    )
    parser.add_argument("--version", action="version", version=f"littrainer {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        commands.add_parser(name, help=purpose)
    return parser


def _answer(given: list[str]) -> int:
    parser = build_parser()
    if not given:
        # As argparse answers a command that is missing, on standard error and with its status.
        parser.print_help(sys.stderr)
        return BAD_INPUT
    name, *rest = given
    if name in COMMANDS:
        return importlib.import_module(f"littrainer.commands.{name}").main(rest)
    if name.startswith("-"):
        parser.parse_args(given)
    if name.endswith(".py") or os.path.isfile(name):
        parser.error(f"to run a script, put `run` before it: littrainer run {name}")
    from littrainer.arguments.did_you_mean import suggestion

    parser.error(f"no command {name!r}; {suggestion(name, COMMANDS)}")
