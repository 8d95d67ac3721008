"""The command `littrainer completion`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence

from littrainer.commands.command_parser import CommandParser
from littrainer.commands.completion_scripts import SCRIPTS
from littrainer.commands.completion_words import (
    CHOICES,
    FOLDERS,
    NOTHING,
    SCRIPT,
    SCRIPT_OR_ARGUMENTS,
    CommandWords,
    Option,
    Vocabulary,
)

DESCRIPTION = """\
Print a script that completes commands, options, their values and training arguments when you press Tab. It holds all
words itself: nothing is started while you type.
"""
EPILOG = """\
bash:  eval "$(littrainer completion bash)"                                   in ~/.bashrc
zsh:   eval "$(littrainer completion zsh)"                                    in ~/.zshrc, behind compinit
fish:  littrainer completion fish > ~/.config/fish/completions/littrainer.fish
"""
# Command -> what it takes besides options, where its parser does not list the words.
OPERANDS = {"run": SCRIPT, "explain": SCRIPT_OR_ARGUMENTS, "report": FOLDERS}
TRUTH_VALUES = ("true", "false")


def build_parser() -> CommandParser:
    """The parser of the command line."""
    parser = CommandParser("littrainer completion", description=DESCRIPTION, epilog=EPILOG)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="the shell that reads the script")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command on what follows `littrainer completion`; returns the exit status."""
    shell = build_parser().parse_args(words).shell
    print(SCRIPTS[shell](vocabulary()), end="")
    return 0


def vocabulary() -> Vocabulary:
    """All words of the command line, as its parsers have them."""
    from littrainer import cli
    from littrainer.arguments.parser import HfArgumentParser
    from littrainer.arguments.training_arguments import Seq2SeqTrainingArguments

    commands = []
    for name, command in cli.COMMANDS.items():
        parser = importlib.import_module(command.module).build_parser()
        positional = [action for action in parser._actions if not action.option_strings]
        choices = tuple(str(choice) for action in positional for choice in action.choices or ())
        operands = OPERANDS.get(name, CHOICES if choices else NOTHING)
        commands.append(CommandWords(name, command.purpose, tuple(_options(parser)), operands, choices))
    arguments = HfArgumentParser(Seq2SeqTrainingArguments, add_help=False)
    return Vocabulary(tuple(commands), tuple(_options(cli.build_parser())), tuple(_options(arguments)))


def _options(parser: argparse.ArgumentParser) -> Iterator[Option]:
    for action in parser._actions:
        if not action.option_strings or action.help == argparse.SUPPRESS:
            continue
        # Training arguments are understood with dashes too; showing them twice would help nobody.
        names = tuple(dict.fromkeys(name.replace("-", "_") for name in action.option_strings))
        shown = tuple(next(text for text in action.option_strings if text.replace("-", "_") == name) for name in names)
        choices = tuple(str(choice) for choice in action.choices or ())
        if action.metavar == "BOOL":
            choices = TRUTH_VALUES
        about = " ".join((action.help or "").replace("%%", "%").split())
        yield Option(shown, about.partition(". ")[0].partition("; ")[0].rstrip("."), action.nargs != 0, choices)
