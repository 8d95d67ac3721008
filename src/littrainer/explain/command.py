"""The command `littrainer explain`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

BAD_INPUT = 2
DESCRIPTION = """\
Say what training arguments turn into: keywords and parts of lightning.Trainer, and for each argument away from its
default where it went. A script is run, redirected to littrainer, up to its first Trainer, and stopped there: it loads
its data and its model, and trains nothing. What it prints goes to standard error.
"""
USAGE = """\
littrainer explain [OPTIONS] --ARGUMENT VALUE ...
       littrainer explain [OPTIONS] SCRIPT [ARGS ...]"""


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"littrainer explain: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command's own options; training arguments and scripts are told apart by `split`."""
    parser = _Parser(prog="littrainer explain", description=DESCRIPTION, usage=USAGE, allow_abbrev=False)
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
        return _complain("--model and --data say what --as-code prints; give it too")
    if script is not None:
        if "--as-code" in rest or "--as_code" in rest:
            return _complain(f"--as-code behind {script!r} would be an argument of the script; write it before")
        return _explain_script(script, rest, options.as_code, source)
    from littrainer.arguments.parser import HfArgumentParser
    from littrainer.arguments.seq2seq_arguments import Seq2SeqTrainingArguments
    from littrainer.explain.stand_ins import trainer_for

    parser = HfArgumentParser(Seq2SeqTrainingArguments, prog="littrainer explain", add_help=False)
    try:
        (args,) = parser.parse_args_into_dataclasses(rest, look_for_args_file=False)
        text = render(None if options.as_code else trainer_for(args), args, source, "these arguments")
    except (TypeError, ValueError, NotImplementedError, ImportError) as error:
        return _complain(str(error))
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
        elif word.startswith(("--model=", "--data=")):
            own.append(word)
        elif not rest and not word.startswith("-"):
            return own, word, list(words[position + 1 :])
        else:
            rest.append(word)
        position += 1
    return own, None, rest


def render(trainer: Any, args: Any, source: dict[str, str | None], origin: str) -> str:
    """The report on a Trainer, or the program for its arguments where there is none."""
    if trainer is not None:
        from littrainer.explain.report import explanation

        return explanation(trainer, args)
    from littrainer.explain.program import Source, program

    return program(args, Source(**source), origin)


def _explain_script(script: str, rest: list[str], as_code: bool, source: dict[str, str | None]) -> int:
    from littrainer.compat.redirect import extend_to_children

    if not os.path.isfile(script):
        return _complain(f"no script {script!r} (looked in {os.path.abspath(os.path.dirname(script) or '.')})")
    environment = dict(os.environ)
    extend_to_children(environment)
    wish = json.dumps({"as_code": as_code, "source": source})
    command = [sys.executable, "-m", "littrainer.explain.in_script", wish, script, *rest]
    sys.stdout.flush()
    return subprocess.run(command, env=environment, check=False).returncode


def _complain(message: str) -> int:
    print(f"littrainer explain: {message}", file=sys.stderr)
    return BAD_INPUT
