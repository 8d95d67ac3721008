"""The command lines of a page: each is carried out, or held against what it names."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from littrainer import Seq2SeqTrainingArguments
from littrainer.cli import main
from tests.docs.blocks import COMMANDS, ROOT, Block
from tests.docs.forks import Forks
from tests.docs.programs import become

LIMIT_KEYWORDS = ("littrainer", "python", "python3", "torchrun", "accelerate")
LINE_TIMEOUT_SECONDS = 900
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = {*re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE), *re.findall(r"^(\w+) \?=", MAKEFILE, re.MULTILINE)}


class PageError(AssertionError):
    """A page is wrong; the message names the place."""


@dataclass(frozen=True)
class CommandLine:
    """A command of a block.

    Parameters:
        place: page and line.
        text: the command, with continued lines joined.
        shown: the lines of output below it, in a block whose commands have a prompt.
    """

    place: str
    text: str
    shown: tuple[str, ...] = ()


@dataclass
class Shell:
    """Executes the commands of a page.

    Parameters:
        folder: the working folder.
        forks: starts processes.
        environment: variables for them; `export` adds to it.
    """

    folder: Path
    forks: Forks
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def carry_out(self, line: CommandLine) -> None:
        """Carry out the command, or check what it names where that would take long or needs the network.

        Raises:
            PageError: it fails, or names what is not there.
        """
        if is_synopsis(line.text):
            return check_names(line, re.sub(r"[][|]", " ", line.text.partition("  #")[0]))
        outside_quotes = re.sub(r"'[^']*'|\"[^\"$`]*\"", "", line.text.partition("  #")[0])
        if re.search(r"[|;&`<]|\$\(", outside_quotes):
            return self._run_several(line)
        words = shlex.split(line.text, comments=True)
        variables = {}
        while words and re.match(r"[A-Za-z_]\w*=", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if not words:
            return None
        program = os.path.basename(words[0])
        if program == "export":
            for name, _, value in (word.partition("=") for word in words[1:]):
                self.environment[name] = value
            return None
        if is_example(words):
            return check_example(line, words)
        module = " ".join(words[1:3]) if program in ("python", "python3") else ""
        if check := CHECKS.get(program) or CHECKS_OF_MODULES.get(module):
            return check(line, words)
        if program not in LIMIT_KEYWORDS:
            raise PageError(f"{line.place}: nothing is known about how to execute {words[0]!r}: {line.text}")
        output = None
        if ">" in words[:-1]:
            output, words = words[words.index(">") + 1], words[: words.index(">")]
        status = self.forks.run(
            become,
            [program, *words[1:]],
            output,
            folder=str(self.folder),
            environment={**self.environment, **variables},
            seconds=LINE_TIMEOUT_SECONDS,
        )
        if status != 0:
            raise PageError(f"{line.place}: ended with status {status}: {line.text}")
        return None

    def _run_several(self, line: CommandLine) -> None:
        """A line that a shell has to take apart; what is only checked, as `make`, is not left to it."""
        parts = re.split(r"\s*(?:&&|;)\s*", line.text)
        if any(part.split()[0] in CHECKS for part in parts if part):
            for part in parts:
                self.carry_out(CommandLine(line.place, part))
            return
        path = f"{Path(sys.executable).parent}{os.pathsep}{self.environment.get('PATH', '')}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line.text],
            cwd=self.folder,
            env={**self.environment, "PATH": path},
            timeout=LINE_TIMEOUT_SECONDS,
        )
        if done.returncode != 0:
            raise PageError(f"{line.place}: ended with status {done.returncode}: {line.text}")


def command_lines_of(block: Block) -> list[CommandLine]:
    """The commands of a block; where some line has the prompt `$ `, the other lines are what commands print."""
    assert block.language in COMMANDS
    has_prompts = any(text.startswith("$ ") for text in block.code.splitlines())
    results: list[CommandLine] = []
    continued: tuple[int, str] | None = None
    for number, text in enumerate(block.code.splitlines(), start=block.line):
        if continued is not None:
            number, text = continued[0], f"{continued[1]} {text.strip().removeprefix('> ')}"
        elif has_prompts and not text.startswith("$ "):
            if results:
                results[-1] = CommandLine(results[-1].place, results[-1].text, (*results[-1].shown, text))
            continue
        else:
            text = text.removeprefix("$ ").strip()
        continued = (number, text[:-1].rstrip()) if text.endswith("\\") else None
        if continued is None and text and not text.startswith("#"):
            results.append(CommandLine(f"{block.page}:{number}", text))
    return results


def is_synopsis(text: str) -> bool:
    """Return whether a line is a synopsis, as in `littrainer report DIR [-o FILE]`."""
    text = text.partition("  #")[0]
    return bool(re.search(r"(?<![\w=.])\[[^\]]+\]|\s[A-Z][A-Z_]+(?=\s|$)|\s\.\.\.(?=\s|$)|<[a-z_ -]+>", text))


# ---- What is checked and not carried out -----------------------------------------------------------------------------


def is_example(words: list[str]) -> bool:
    """Return whether a command trains an example, which has separate tests."""
    return any(word.startswith("examples/") for word in words) and "report" not in words[:2]


def check_example(line: CommandLine, words: list[str]) -> None:
    """The script is there and has the options; tests/examples runs it."""
    (script,) = (word for word in words if word.startswith("examples/"))
    path = ROOT / script
    if not path.is_file():
        raise PageError(f"{line.place}: there is no {script}")
    text = path.read_text(encoding="utf-8")
    for word in words[words.index(script) + 1 :]:
        option = re.match(r"--([\w.-]+)", word)
        if option is None:
            continue
        name = option[1].split(".")[-1]
        fields = Seq2SeqTrainingArguments.__dataclass_fields__
        spellings = {name, name.replace("-", "_")}
        if not any(re.search(rf"\b{re.escape(spelling)}\b", text) or spelling in fields for spelling in spellings):
            raise PageError(f"{line.place}: {script} has no option --{option[1]}")


def check_names(line: CommandLine, text: str) -> None:
    """The targets, commands and options that a line names are there."""
    if unknown := unknown_in(text):
        raise PageError(f"{line.place}: there is no {', '.join(unknown)}: {line.text}")


def check_make(line: CommandLine, words: list[str]) -> None:
    """Check a make target only, since CI runs it."""
    check_names(line, shlex.join(words))


@functools.cache
def help_of(*words: str) -> str:
    """Return the output of `littrainer WORDS --help`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return printed.getvalue()


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", text)) | {"--help"}


def unknown_in(command: str) -> list[str]:
    """Return what a command names that does not exist.

    Parameters:
        command: a text that begins with `littrainer` or `make`.
    """
    program, *words = shlex.split(command)
    if program == "make":
        return [word for word in words if word.partition("=")[0] not in TARGETS]
    if not words or words[0].startswith("-"):
        return [word for word in words if word not in options_in(help_of())]
    if words[0].isupper():
        return []
    if not re.search(rf"^ *{{?.*\b{re.escape(words[0])}\b", help_of(), re.MULTILINE):
        return [words[0]]
    arguments = words[1:]
    # Arguments after the script, or the module, belong to it.
    script_index = next(
        (place for place, word in enumerate(arguments) if word.endswith(".py") or word == "-m"), len(arguments)
    )
    options = options_in(help_of(words[0]))
    if words[0] == "explain":
        options |= {f"--{name}" for name in Seq2SeqTrainingArguments.__dataclass_fields__}
    given = [word.partition("=")[0] for word in arguments[:script_index] if re.match(r"--?[A-Za-z]", word)]
    return [word for word in given if word not in options]


def check_pip(line: CommandLine, words: list[str]) -> None:
    """Check that pip accepts the requirement, and that our extras exist."""
    import tomllib
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "install" in words, f"{line.place}: {line.text}"
    for word in words[words.index("install") + 1 :]:
        if word.startswith("-") or word.endswith(".whl"):
            continue
        of_a_folder = re.fullmatch(r"\./?(?:\[(.*)\])?", word)
        named = Requirement(f"littrainer[{of_a_folder[1] or ''}]" if of_a_folder else word.partition("+")[0])
        unknown = named.extras - set(project["optional-dependencies"]) if named.name == "littrainer" else set()
        if unknown:
            raise PageError(f"{line.place}: pyproject.toml has no extra {', '.join(sorted(unknown))}")


def check_tests(line: CommandLine, words: list[str]) -> None:
    """The tests that pytest is asked for are there."""
    for word in words[words.index("pytest") + 1 :]:
        if not word.startswith("-") and not (ROOT / word.partition("::")[0]).exists():
            raise PageError(f"{line.place}: there is no {word}")


def needs_the_network(line: CommandLine, words: list[str]) -> None:
    """Fetches the sources."""
    if words[:2] != ["git", "clone"]:
        raise PageError(f"{line.place}: nothing is known about {line.text}")


def enters_a_folder(line: CommandLine, words: list[str]) -> None:
    """Accept the folder of the sources alone; each page's commands run in the repository anyway."""
    if words[1:] != ["littrainer"]:
        raise PageError(f"{line.place}: only the fetched sources are entered: {line.text}")


def makes_an_environment(line: CommandLine, words: list[str]) -> None:
    """Skip virtual environments; everything here runs in one."""


CHECKS = {
    "make": check_make,
    "pip": check_pip,
    "git": needs_the_network,
    "cd": enters_a_folder,
    "source": makes_an_environment,
    ".": makes_an_environment,
}
CHECKS_OF_MODULES = {"-m pytest": check_tests, "-m pip": check_pip, "-m venv": makes_an_environment}
