"""The command `littrainer report`: writes a page and a picture of trainings and searches."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from littrainer.commands.command_line import CommandParser, complain
from littrainer.commands.report_folders import NothingToReport, Run, Search, read_folders, step_of
from littrainer.errors.atomic_files import write_whole

FAILURE = 1
DEFAULT_NAME = "report.html"
PAGE_ENDINGS = (".html", ".htm")
# A report is known by this, in the first bytes of both files, and may be written again.
MARK, HEAD_BYTES = b"littrainer report", 4096
DESCRIPTION = """\
Write what a training logged as one HTML page and one PNG picture: losses, metrics, learning rate, gradient norm, speed,
the best checkpoint, and the arguments away from their defaults. Several folders are drawn over each other and compared.
The output_dir of a hyperparameter search shows its trials. Folders that transformers wrote are read too.
"""


def build_parser() -> CommandParser:
    """The parser of the command line."""
    parser = CommandParser("littrainer report", description=DESCRIPTION)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "folders", nargs="+", metavar="OUTPUT_DIR", help="output_dir of a training or a search, or a checkpoint folder"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE.html",
        help="the page; the picture goes next to it (default: report.html in OUTPUT_DIR, or in the working "
        "directory if several are given)",
    )
    parser.add_argument("--no-png", action="store_true", help="write the page alone")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command on what follows `littrainer report`; returns the exit status."""
    options = build_parser().parse_args(words)
    if importlib.util.find_spec("matplotlib") is None:
        complain("report", "the charts take matplotlib, which is not installed: pip install 'littrainer[report]'.")
        return FAILURE
    from littrainer.commands.report_page import page, picture

    try:
        runs, searches = read_folders(options.folders)
        target = _target(runs, searches, options.output)
        drawn = picture(runs, searches)
        write_whole(target, page(runs, searches, drawn))
        print(f"page: {target}")
        if not options.no_png:
            write_whole(target.with_suffix(".png"), drawn)
            print(f"picture: {target.with_suffix('.png')}")
    except NothingToReport as error:
        return complain("report", str(error))
    except OSError as error:
        return complain(
            "report", f"{error.filename} cannot be written: {error.strerror}; give another place with -o FILE.html."
        )
    return 0


def _target(runs: list[Run], searches: list[Search], output: str | None) -> Path:
    """Where the page goes.

    Raises:
        NothingToReport: no page can be written there, or it would take the place of a file that is no report.
    """
    if output is not None:
        target = Path(output)
        if target.suffix.lower() not in PAGE_ENDINGS:
            raise NothingToReport(f"-o {output} names no page; give a name that ends in .html.")
        if target.is_dir() or not target.parent.is_dir():
            reason = "is a folder" if target.is_dir() else f"lies in {target.parent}, which is no folder"
            raise NothingToReport(f"-o {output} {reason}; give the name of a file in a folder that exists.")
        return target
    folders = {search.file.parent for search in searches} | {run.folder for run in runs}
    home = folders.pop() if len(folders) == 1 else Path()
    # One more file would make a checkpoint differ from its manifest.
    target = (home.parent if step_of(home) is not None else home) / DEFAULT_NAME
    for path in (target, target.with_suffix(".png")):
        if path.exists() and not (path.is_file() and MARK in path.read_bytes()[:HEAD_BYTES]):
            raise NothingToReport(
                f"{path} is there and is no report of littrainer; give another place with -o FILE.html."
            )
    return target
