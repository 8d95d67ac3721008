"""Command-line parsers, errors and exit statuses of all commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

BAD_INPUT = 2
# Shells' exit statuses after SIGPIPE and SIGINT.
PIPE_CLOSED, INTERRUPTED = 128 + 13, 128 + 2
STANDARD_INPUT = "-"


class BadInput(Exception):
    """Unusable command line, or a file named in it; the message has the remedy."""


class CommandParser(argparse.ArgumentParser):
    """Parser with one-line errors, which suggest the nearest option.

    Parameters:
        command: name of the command, such as `report`.
    """

    def __init__(self, command: str, description: str, **keywords: Any) -> None:
        prog = f"littrainer {command}".rstrip()
        super().__init__(prog=prog, description=description, allow_abbrev=False, **keywords)

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            from littrainer.arguments.did_you_mean import unrecognized

            self.error(unrecognized(unknown, list_option_names(self)))
        return options


class ProgramParser(CommandParser):
    """Parser of a command that starts a program: options, then a script (or `-m` and a module) with its arguments."""

    def __init__(self, command: str, description: str) -> None:
        start = f"littrainer {command} [-h] [OPTIONS]"
        usage = f"{start} SCRIPT [ARGS ...]\n       {start} -m MODULE [ARGS ...]"
        epilog = "Everything after SCRIPT or MODULE is passed to the program."
        super().__init__(command, description, usage=usage, epilog=epilog)
        self.add_argument("-m", dest="is_module", action="store_true", help="run a module, as in python -m")
        self.add_argument(
            "program", nargs=argparse.REMAINDER, metavar="SCRIPT", help="script, or folder with __main__.py"
        )

    def parse_program(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options, and the program in python's form."""
        options = self.parse_args(words)
        program = list(options.program)
        if program[:1] == ["--"]:
            # Python would parse a name that begins with a dash as an option.
            program[:2] = [os.path.join(os.curdir, name) for name in program[1:2]]
        if not program:
            self.error("no program is named; give a SCRIPT, or -m MODULE, after the options and their values")
        if options.is_module:
            return options, ["-m", *program]
        script = program[0]
        if os.path.isdir(script):
            if not os.path.isfile(os.path.join(script, "__main__.py")):
                raise BadInput(f"{script} is a folder without a __main__.py; name the script in it")
        elif script != STANDARD_INPUT:
            check_script(script)
        return options, program


def check_script(script: str) -> None:
    if os.path.isdir(script) or not os.path.exists(script):
        raise BadInput(f"no script {script!r} (looked in {os.path.abspath(os.path.dirname(script))})")


def list_option_names(parser: argparse.ArgumentParser) -> list[str]:
    return [name for name in parser._option_string_actions if name.startswith("--")]


def reject(command: str, message: object) -> int:
    """Print a line about bad input; return the exit status."""
    print(f"littrainer {command}: {message}", file=sys.stderr)
    return BAD_INPUT


def run_quietly(command: Callable[[], int]) -> int:
    """Run a command; Ctrl-C and a closed pipe (`| head -1`) end it without a message."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    try:
        try:
            return command()
        finally:
            # argparse raises SystemExit before its help page is flushed.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes again at exit, and would report the error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        if os.name == "posix":
            import signal

            # A shell ends a loop around the command only if the command died of the signal.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return INTERRUPTED
