"""Carries out a page's code from top to bottom, in one process, as a reader would who follows the page."""

from __future__ import annotations

import ast
import json
import linecache
import os
import re
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.docs.blocks import (
    COMMANDS,
    CONFIGURATION,
    NOT_CODE,
    OUTPUT,
    PYTHON,
    Block,
    blocks_of,
    statements_of,
)
from tests.docs.command_lines import CommandLine, PageError, Shell, command_lines_of
from tests.docs.forks import Forks
from tests.docs.not_executed import OUTPUT_TESTED_BY, reason_for

SAID = re.compile(r"\)\s+# ([-\d'\"\[{(].*|(?:True|False|None)\b.*)$")
"""A comment behind `print(...)` that begins with a value says what is printed."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass
class PageRun:
    """A page that is executed.

    Parameters:
        page: its file, relative to the root.
        log: the file that standard output and error of this process go to.
        names: the namespace of the page's Python; the module `__main__`.
        shell: for its commands.
    """

    page: str
    log: Path
    names: dict[str, Any]
    shell: Shell
    printed: str = ""
    not_run_yet: list[Block] = field(default_factory=list)

    def execute(self, block: Block) -> None:
        """Execute a block by its language.

        Raises:
            PageError: the page is wrong.
        """
        if reason_for(block.page, block.code):
            return
        if block.title:
            self._write(block)
        elif block.language in PYTHON:
            self._execute_python(block)
        elif block.language in COMMANDS:
            for line in command_lines_of(block):
                self._execute_command(line)
        elif block.language in CONFIGURATION:
            _parsed(block)
        elif block.language in OUTPUT and block.page in OUTPUT_TESTED_BY:
            return
        elif block.language in OUTPUT:
            self._compare(block.code.splitlines(), block.place)
        elif block.language not in NOT_CODE:
            raise PageError(f"{block.place}: nothing is known about how to execute a block of {block.language!r}")

    def finish(self) -> None:
        """Run the scripts that no command of the page has run."""
        for block in self.not_run_yet:
            self._execute_command(CommandLine(block.place, f"littrainer run {block.title}"))

    def _write(self, block: Block) -> None:
        assert block.title is not None
        if block.language in CONFIGURATION:
            _parsed(block)
        path = self.shell.folder / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.code, encoding="utf-8")
        if block.language in PYTHON:
            self.not_run_yet = [*(other for other in self.not_run_yet if other.title != block.title), block]

    def _execute_python(self, block: Block) -> None:
        self._use_redirection_for(block)
        for statement, text in statements_of(block):
            exec(compile(ast.Module([statement], []), block.page, "exec"), self.names)
            printed = self._newly_printed()
            said = SAID.search(text)
            if said and text.startswith("print("):
                value = said[1].partition(": ")[0].partition(", ")[0] if said[1][0] in "-0123456789" else said[1]
                if value not in (line.strip() for line in printed.splitlines()):
                    raise PageError(f"{block.page}:{statement.end_lineno}: `{text}` prints {printed.strip()[:500]!r}")

    def _use_redirection_for(self, block: Block) -> None:
        """Code that takes Trainer names from transformers is shown as a script that `littrainer run` starts."""
        from littrainer.redirection.names import REPLACED
        from littrainer.redirection.redirect import install, is_installed

        redirected = {name for row in REPLACED.values() for name in row}
        imports = [node for node in ast.walk(ast.parse(block.code)) if isinstance(node, ast.ImportFrom)]
        of_transformers = [node for node in imports if (node.module or "").partition(".")[0] == "transformers"]
        imported = {alias.name for node in of_transformers for alias in node.names}
        if imported & redirected and not is_installed():
            install()

    def _execute_command(self, line: CommandLine) -> None:
        if reason_for(self.page, line.text):
            return
        self.not_run_yet = [block for block in self.not_run_yet if (block.title or "") not in line.text.split()]
        self.shell.carry_out(line)
        self._newly_printed()
        self._compare(list(line.shown), line.place)

    def _newly_printed(self) -> str:
        sys.stdout.flush()
        sys.stderr.flush()
        text = self.log.read_text(encoding="utf-8", errors="replace")
        newly = text[len(self.printed) :]
        self.printed = text
        return newly

    def _compare(self, shown: list[str], place: str) -> None:
        """Check that each shown line was printed by the code above it; numbers may differ."""
        printed = [_strip_numbers(line) for line in re.split(r"[\r\n]+", self.printed)]
        for line in shown:
            expected = _strip_numbers(line)
            parts = [re.escape(part) for part in expected.split("...")]
            if expected and not any(re.search(".*".join(parts), text) for text in printed):
                raise PageError(f"{place}: nothing above prints {line.strip()!r}; printed was\n{self.printed[-4000:]}")


def run_page(page: str, root: str, log: str) -> None:
    """Carry out a page in this process, which is forked for it; the working folder is empty.

    Raises:
        Exception: the code of the page fails, or a PageError: the page says what is not so.
    """
    from littrainer import set_seed
    from tests.docs.expectations import EXPECTATIONS
    from tests.docs.preparations import PREPARATIONS

    sys.path[:] = [folder for folder in sys.path if folder and Path(folder).resolve() != Path(root).resolve()]
    main = types.ModuleType("__main__")
    main.__file__ = page
    sys.modules["__main__"] = main
    _show_in_tracebacks(page, root)
    set_seed(0)
    # Before the page's code has changed anything in this process.
    with Forks.is_this_process() as forks:
        run = PageRun(page, Path(log), vars(main), Shell(Path.cwd(), forks))
        if page in PREPARATIONS:
            run.names.update(PREPARATIONS[page](Path.cwd()))
        for block in blocks_of(page, Path(root)):
            run.execute(block)
        run.finish()
    if page in EXPECTATIONS:
        EXPECTATIONS[page](run.names, Path.cwd(), run.printed)


def _show_in_tracebacks(page: str, root: str) -> None:
    text = Path(root, page).read_text(encoding="utf-8")
    linecache.cache[page] = (len(text), None, text.splitlines(keepends=True), page)


def _strip_numbers(line: str) -> str:
    return " ".join(NUMBER.sub("0", line).split())


def _parsed(block: Block) -> Any:
    if block.language == "json":
        return json.loads(block.code)
    if block.language == "toml":
        import tomllib

        return tomllib.loads(block.code)
    import yaml

    return yaml.safe_load(block.code)


def environment_of_a_page() -> dict[str, str]:
    """Variables for a page's process: the CPU, no windows, no network."""
    return {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
