"""The command `littrainer report`: writes a page and a picture of trainings and searches."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from littrainer.checkpoint.layout import RUN_RECORD_NAME, TRAINER_STATE_NAME, checkpoint_step
from littrainer.commands.command_line import CommandParser, complain
from littrainer.commands.report_charts import Chart, picture, search_charts, training_charts
from littrainer.commands.report_folders import NothingToReport, Run, Search, last_changes, read_folders
from littrainer.commands.report_page import page
from littrainer.errors.atomic_files import write_whole
from littrainer.errors.remote_folder import RemoteFolderError, address_of, local_folder
from littrainer.search.record import SEARCH_RECORD_NAME

DEFAULT_NAME = "report.html"
PAGE_ENDINGS = (".html", ".htm")
# While --watch looks for changes, and how often a page that is open loads itself again.
LOOK_SECONDS, RELOAD_SECONDS = 2.0, 5
# A report is known by this, in the first bytes of both files, and may be written again.
MARK, HEAD_BYTES = b"littrainer report", 4096
# What is downloaded of a run at an address.
READ_FILES = (TRAINER_STATE_NAME, RUN_RECORD_NAME, SEARCH_RECORD_NAME, "config.json", "adapter_config.json")
DESCRIPTION = """\
Write what a training logged as one HTML page and one PNG picture: losses, metrics, learning rate, gradient norm, speed,
the best checkpoint, the environment, and the arguments that differ from their defaults. Several folders are drawn over
each other and compared. The output_dir of a hyperparameter search shows its trials. The command also reads the folders
that transformers wrote, and the metrics.csv that Lightning's CSVLogger wrote.
"""


def build_parser() -> CommandParser:
    """The parser of the command line."""
    parser = CommandParser("littrainer report", description=DESCRIPTION)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="OUTPUT_DIR",
        help="output_dir of a training or a search, or a checkpoint folder; also an address, such as s3://bucket/run",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE.html",
        help="the page; the picture goes into the same folder (default: report.html in OUTPUT_DIR, or in the working "
        "directory for several, and for an address)",
    )
    parser.add_argument("--no-png", action="store_true", help="write the page alone")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="follow a running training until Ctrl-C: write the page again with each checkpoint or trial; an open page "
        "loads itself again and keeps its settings",
    )
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command on what follows `littrainer report`; returns the exit status."""
    options = build_parser().parse_args(words)
    try:
        if options.watch:
            _watch(options)
        # What --watch has written last still loads itself again.
        target, charts = _write_page(options)
        print(f"page: {target}")
        if not options.no_png:
            _write_picture(target.with_suffix(".png"), charts)
    except NothingToReport as error:
        return complain("report", str(error))
    except OSError as error:
        return complain(
            "report", f"{error.filename} cannot be written: {error.strerror}; give another place with -o FILE.html."
        )
    return 0


def _write_page(options: argparse.Namespace, live_seconds: int = 0) -> tuple[Path, list[Chart]]:
    runs, searches = read_folders(_downloaded(options.folders))
    target = _target(runs, searches, options.output)
    charts = [
        *(chart for place, search in enumerate(searches) for chart in search_charts(search.stored, f"search {place}")),
        *training_charts(runs),
    ]
    write_whole(target, page(runs, searches, charts, live_seconds))
    return target, charts


def _downloaded(folders: Sequence[str]) -> list[str]:
    """Return the folders, those at an address as local ones with the files that a report reads."""
    local = []
    for given in folders:
        try:
            local.append(local_folder(given))
            if local[-1] != given:
                # They load torch, which reports on local folders do without.
                from littrainer.checkpoint.remote import fetch_small_files
                from littrainer.checkpoint.run_lock import is_abandoned

                # A run of this machine has the newest files here.
                if is_abandoned(Path(local[-1])):
                    fetch_small_files(Path(local[-1]), READ_FILES)
        except (RemoteFolderError, ImportError, ValueError) as error:
            raise NothingToReport(str(error)) from error
    return local


def _write_picture(path: Path, charts: list[Chart]) -> None:
    try:
        drawn = picture(charts)
    except ImportError:
        print("picture: not written; it needs matplotlib: pip install matplotlib")
        return
    write_whole(path, drawn)
    print(f"picture: {path}")


def _watch(options: argparse.Namespace) -> None:
    """Write the page at each change, until Ctrl-C."""
    seen: list[tuple[str, int]] = []
    print(f"waiting for changes in {', '.join(options.folders)}; Ctrl-C ends this", flush=True)
    for folder in options.folders:
        if not Path(folder).exists():
            print(f"{folder} does not exist yet; a training that has it as output_dir makes it", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            changes = last_changes(_downloaded(options.folders))
            if changes != seen:
                try:
                    target, _ = _write_page(options, RELOAD_SECONDS)
                    if not seen:
                        print(f"page: {target}", flush=True)
                    seen = changes
                except NothingToReport:
                    # A checkpoint may go while it is read.
                    if not seen:
                        raise
            time.sleep(LOOK_SECONDS)


def _target(runs: list[Run], searches: list[Search], output: str | None) -> Path:
    """Where the page goes.

    Raises:
        NothingToReport: no page can be written there, or it would take the place of a file that is no report.
    """
    if output is not None:
        target = Path(output)
        if target.suffix.lower() not in PAGE_ENDINGS or target.is_dir() or not target.parent.is_dir():
            raise NothingToReport(
                f"-o {output} is no place for a page; name a file that ends in .html, in a folder that exists."
            )
        return target
    folders = {search.file.parent for search in searches} | {run.folder for run in runs}
    home = folders.pop() if len(folders) == 1 else Path()
    home = Path() if address_of(home) else home
    # One more file would make a checkpoint differ from its manifest.
    target = (home.parent if checkpoint_step(home) is not None else home) / DEFAULT_NAME
    for path in (target, target.with_suffix(".png")):
        if path.exists() and not (path.is_file() and MARK in path.read_bytes()[:HEAD_BYTES]):
            raise NothingToReport(
                f"{path} exists and is not a report of littrainer; give another place with -o FILE.html."
            )
    return target
