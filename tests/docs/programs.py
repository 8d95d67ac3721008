"""Runs programs in a process that has the libraries imported, instead of a new interpreter."""

from __future__ import annotations

import os
import runpy
import sys
from typing import NoReturn


def become(tokens: list[str], output: str | None = None) -> None:
    """Do what the command does, in this process.

    Parameters:
        words: the command, split: littrainer, python, torchrun or accelerate with what follows.
        output: a file for what it prints.
    """
    if output is not None:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 1)
    program, *arguments = tokens
    os.execve = _continue_here  # type: ignore[assignment]
    if program == "littrainer":
        from littrainer.cli import main

        sys.argv = ["littrainer", *arguments]
        sys.exit(main(arguments))
    if program == "torchrun":
        from torch.distributed.run import main as torchrun

        torchrun(arguments)
    elif program == "accelerate":
        from accelerate.commands.accelerate_cli import main as accelerate

        sys.argv = ["accelerate", *arguments]
        accelerate()
    else:
        _interpret(arguments)


def _continue_here(path: str, command: list[str], environment: dict[str, str]) -> NoReturn:
    """`os.execve` of an interpreter: continues in this process, with the interpreter's initial state."""
    from littrainer.redirection.redirect import STARTUP_FOLDER, install

    os.environ.clear()
    os.environ.update(environment)
    if STARTUP_FOLDER in environment.get("PYTHONPATH", "").split(os.pathsep):
        install()
    _interpret(command[1:])
    sys.exit(0)


def _interpret(arguments: list[str]) -> None:
    """Run Python with these arguments."""
    arguments = list(arguments)
    while arguments and arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
        arguments.pop(0)
    if arguments[0] == "-m":
        # An interpreter has the working folder here, this process the root of the repository.
        sys.path[0] = os.getcwd()
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
