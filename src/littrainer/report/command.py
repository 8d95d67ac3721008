"""The command `littrainer report`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from littrainer.checkpoint.names import PREFIX_CHECKPOINT_DIR
from littrainer.commands.command_line import CommandParser, complain
from littrainer.report.page import MARK, page
from littrainer.report.picture import can_draw, picture
from littrainer.report.reading import Findings, NothingToReport, read_folders
from littrainer.whole_files import write_whole

DEFAULT_NAME = "report.html"
PAGE_ENDINGS = (".html", ".htm")
# So far into a file its mark is looked for.
HEAD_BYTES = 4096
DESCRIPTION = """\
Write what a training logged as one HTML page and one PNG picture: losses, metrics, learning rate, gradient norm, speed,
the best checkpoint, and the arguments away from their defaults. Several folders are drawn over each other and compared.
The output_dir of a hyperparameter search shows its trials. Folders that transformers wrote are read too, and nothing
that stands in their files is run.
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
        help="the page; the picture goes beside it (default: report.html in OUTPUT_DIR, or in the working "
        "directory where several are given)",
    )
    parser.add_argument(
        "--scale",
        choices=("auto", "linear", "log"),
        default="auto",
        help="value axes: auto is logarithmic where most of the values span more than two powers of ten",
    )
    parser.add_argument("--no-png", action="store_true", help="write the page alone")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command on what follows `littrainer report`; returns the exit status."""
    options = build_parser().parse_args(words)
    try:
        found = read_folders(options.folders)
        target = _target(found, options.output)
        write_whole(target, page(found.runs, options.scale, found.searches))
        print(f"page: {target}")
        if options.no_png:
            return 0
        if not can_draw():
            print(
                "littrainer report: no picture was written, since matplotlib is not installed: "
                "pip install 'littrainer[report]', or give --no-png.",
                file=sys.stderr,
            )
            return 0
        drawn = target.with_suffix(".png")
        write_whole(drawn, picture(found.runs, options.scale, MARK, found.searches))
        print(f"picture: {drawn}")
    except NothingToReport as error:
        return complain("report", str(error))
    except OSError as error:
        return complain(
            "report", f"{error.filename} cannot be written: {error.strerror}; give another place with -o FILE.html."
        )
    return 0


def _target(found: Findings, output: str | None) -> Path:
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
    target = _home(found) / DEFAULT_NAME
    for path in (target, target.with_suffix(".png")):
        if path.exists() and not _is_report(path):
            raise NothingToReport(
                f"{path} is there and is no report of littrainer; give another place with -o FILE.html."
            )
    return target


def _home(found: Findings) -> Path:
    folders = list(dict.fromkeys([*(search.folder for search in found.searches), *(run.folder for run in found.runs)]))
    if len(folders) > 1:
        return Path()
    folder = folders[0]
    # A file more would make a checkpoint differ from its manifest.
    return folder.parent if folder.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-") else folder


def _is_report(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return MARK.encode() in file.read(HEAD_BYTES)
