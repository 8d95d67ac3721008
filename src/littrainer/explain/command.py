"""The command `littrainer explain`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from littrainer.arguments.parser import HfArgumentParser
from littrainer.commands.command_parser import BAD_INPUT, CommandParser, complain, option_names, unrecognized
from littrainer.commands.ending import status_of

DESCRIPTION = """\
Say what training arguments turn into: keywords and parts of lightning.Trainer, and for each argument away from its
default where it went. A script is run, redirected to littrainer, up to its first Trainer, and stopped there: it loads
its data and its model, and trains nothing. What it prints goes to standard error.
"""
USAGE = """\
littrainer explain [OPTIONS] --ARGUMENT VALUE ...
       littrainer explain [OPTIONS] SCRIPT [ARGS ...]"""


class _ArgumentParser(HfArgumentParser):
    """The parser of the training arguments, whose complaints look like those of all commands."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {' '.join(message.split())}\n")


def build_parser() -> CommandParser:
    """The parser of the command's own options; training arguments and scripts are told apart by `split`."""
    parser = CommandParser("littrainer explain", description=DESCRIPTION, usage=USAGE)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--as-code", action="store_true", help="print the equivalent plain Lightning program")
    parser.add_argument(
        "--model",
        metavar="MODULE:NAME",
        help="with --as-code: what is called to make the model, or the path of a transformers config.json",
    )
    parser.add_argument(
        "--data", metavar="MODULE:NAME", help="with --as-code: what is called to make the training dataset"
    )
    parser.epilog = "The options stand before the script or among the training arguments."
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command on what follows `littrainer explain`; returns the exit status."""
    own, script, rest = split(words)
    options = build_parser().parse_args(own)
    source = {"model": options.model, "data": options.data}
    if not options.as_code and any(source.values()):
        return complain("explain", "--model and --data say what --as-code prints; give it too")
    for option, named in source.items():
        # Without a colon, a model may be the path of a configuration.
        if named is not None and (option == "data" or ":" in named) and not _names_an_object(named):
            return complain("explain", f"--{option} {named!r} is not MODULE:NAME, such as package.module:function")
    if script is not None:
        if "--as-code" in rest or "--as_code" in rest:
            return complain(
                "explain", f"--as-code behind {script!r} would be an argument of the script; write it before"
            )
        return _explain_script(script, rest, options.as_code, source)
    from littrainer.arguments.training_arguments import Seq2SeqTrainingArguments
    from littrainer.explain.program import Source, program
    from littrainer.explain.report import explanation
    from littrainer.explain.stand_ins import trainer_for

    parser = _ArgumentParser(Seq2SeqTrainingArguments, prog="littrainer explain", add_help=False)
    try:
        with warnings.catch_warnings(record=True) as told:
            (args, left) = parser.parse_args_into_dataclasses(
                rest, look_for_args_file=False, return_remaining_strings=True
            )
        for warning in told:
            print(f"littrainer explain: {warning.message}", file=sys.stderr)
        if left:
            behind = next((word for word in left if os.path.isfile(word)), None)
            if behind is not None:
                return complain("explain", f"a script stands before its arguments: littrainer explain {behind} ...")
            if "-m" in left:
                return complain("explain", "modules are not looked up; name the script's file in place of -m")
            known = [*option_names(build_parser()), *option_names(parser)]
            return complain("explain", unrecognized(left, known))
        text = program(args, Source(**source)) if options.as_code else explanation(trainer_for(args), args)
    except (TypeError, ValueError, NotImplementedError, ImportError) as error:
        return complain("explain", str(error))
    print(text, end="")
    return 0


def split(words: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """Divide the words into the command's own options, the script if there is one, and what belongs to it, or else
    the training arguments."""
    own: list[str] = []
    rest: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        if word in ("--as-code", "--as_code", "-h", "--help"):
            own.append(word.replace("_", "-"))
        elif word in ("--model", "--data"):
            own += words[position : position + 2]
            position += 1
        elif word.startswith(("--as-code=", "--model=", "--data=")):
            own.append(word)
        elif not rest and not word.startswith("-"):
            return own, word, list(words[position + 1 :])
        else:
            rest.append(word)
        position += 1
    return own, None, rest


def _names_an_object(text: str) -> bool:
    module, _, name = text.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), name))


def _explain_script(script: str, rest: list[str], as_code: bool, source: dict[str, str | None]) -> int:
    from littrainer.compat.redirect import extend_to_children

    if os.path.isdir(script):
        return complain("explain", f"{script!r} is a folder; name the script in it")
    if not os.path.isfile(script):
        return complain(
            "explain", f"no script {script!r} (looked in {os.path.abspath(os.path.dirname(script) or '.')})"
        )
    environment = dict(os.environ)
    extend_to_children(environment)
    wish = json.dumps({"as_code": as_code, "source": source})
    command = [sys.executable, "-m", "littrainer.explain.in_script", wish, script, *rest]
    if sys.stdout is not None:
        sys.stdout.flush()
    return status_of(subprocess.run(command, env=environment, check=False).returncode)
