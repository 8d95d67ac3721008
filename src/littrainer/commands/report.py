"""The command `littrainer report`: writes a page and a picture of trainings and searches."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from littrainer.checkpoint.layout import RUN_RECORD_NAME, TRAINER_STATE_NAME, checkpoint_step
from littrainer.commands.command_line import BadInput, CommandParser
from littrainer.commands.report_charts import Chart, build_search_charts, build_training_charts, picture
from littrainer.commands.report_folders import MissingState, Run, Search, load_folders
from littrainer.commands.report_page import page
from littrainer.runtime.atomic_files import write_atomically
from littrainer.runtime.remote_folder import RemoteFolderError, get_remote_url, local_folder
from littrainer.search.record import SEARCH_RECORD_NAME

DEFAULT_NAME = "report.html"
PAGE_ENDINGS = (".html", ".htm")
# With --watch, until the page is written again and an open page loads itself again.
RELOAD_SECONDS = 5
# The first bytes of both files have this mark, and a file with it may be replaced.
MARK, HEAD_BYTES = b"littrainer report", 4096
# Files that are downloaded of a remote run.
REMOTE_FILES = (TRAINER_STATE_NAME, RUN_RECORD_NAME, SEARCH_RECORD_NAME, "config.json", "adapter_config.json")
DESCRIPTION = """\
Write what a training logged as one HTML page and one PNG picture: losses, metrics, learning rate, gradient norm, speed,
the best checkpoint, the environment, and the arguments that differ from their defaults. Several folders are drawn over
each other and compared. The output_dir of a hyperparameter search shows its trials. The command also reads the folders
that transformers wrote, and the metrics.csv that Lightning's CSVLogger wrote.
"""
ABOUT_FOLDERS = "output_dir of a training or a search, or a checkpoint folder; also a URL, such as s3://bucket/run"
ABOUT_OUTPUT = (
    "the page; the picture goes into the same folder (default: report.html in OUTPUT_DIR, or in the working directory "
    "for several, and for a URL)"
)
ABOUT_WATCH = (
    "follow a running training until Ctrl-C: write the page again with each checkpoint or trial; an open page loads "
    "itself again and keeps its settings"
)


def main(words: Sequence[str]) -> int:
    """Run the command on the words after `littrainer report`; returns the exit status."""
    parser = CommandParser("report", DESCRIPTION)
    parser.add_argument("folders", nargs="+", metavar="OUTPUT_DIR", help=ABOUT_FOLDERS)
    parser.add_argument("-o", "--output", metavar="FILE.html", help=ABOUT_OUTPUT)
    parser.add_argument("--no-png", action="store_true", help="write the page alone")
    parser.add_argument("--watch", action="store_true", help=ABOUT_WATCH)
    options = parser.parse_args(words)
    try:
        if options.watch:
            _watch(options)
        # The last page of --watch still loads itself again.
        target, charts = _write_page(options)
        print(f"page: {target}")
        if not options.no_png:
            _write_picture(target.with_suffix(".png"), charts)
    except OSError as error:
        raise BadInput(
            f"{error.filename} cannot be written: {error.strerror}; give another place with -o FILE.html."
        ) from error
    return 0


def _write_page(options: argparse.Namespace, live_seconds: int = 0) -> tuple[Path, list[Chart]]:
    runs, searches = load_folders(_local_folders(options.folders))
    target = _target(runs, searches, options.output)
    charts = [
        chart for number, search in enumerate(searches) for chart in build_search_charts(search, f"search {number}")
    ]
    charts += build_training_charts(runs)
    write_atomically(target, page(runs, searches, charts, live_seconds))
    return target, charts


def _local_folders(folders: Sequence[str]) -> list[str]:
    """Return the folders, with a local one for each URL that has the files that a report reads."""
    paths = []
    for folder in folders:
        try:
            path = local_folder(folder)
            if path != folder:
                # They load torch, which reports on local folders do without.
                from littrainer.checkpoint.remote import download_small_files
                from littrainer.checkpoint.store import is_abandoned

                # A run of this machine has the newest files here.
                if is_abandoned(Path(path)):
                    path = str(download_small_files(Path(path), REMOTE_FILES))
        except (RemoteFolderError, ImportError, OSError, ValueError) as error:
            raise BadInput(str(error)) from error
        paths.append(path)
    return paths


def _write_picture(path: Path, charts: list[Chart]) -> None:
    try:
        write_atomically(path, picture(charts))
    except ImportError:
        print("picture: not written; it needs matplotlib: pip install matplotlib")
    else:
        print(f"picture: {path}")


def _watch(options: argparse.Namespace) -> None:
    """Write the page again and again, until Ctrl-C."""
    is_written = False
    print(f"waiting for changes in {', '.join(options.folders)}; Ctrl-C ends this", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            try:
                target, _ = _write_page(options, RELOAD_SECONDS)
                if not is_written:
                    print(f"page: {target}", flush=True)
                is_written = True
            except BadInput as error:
                # Before the training begins there is no state, and a checkpoint may be deleted while it is read.
                if not is_written and not isinstance(error, MissingState):
                    raise
            time.sleep(RELOAD_SECONDS)


def _target(runs: list[Run], searches: list[Search], output: str | None) -> Path:
    """Return the path of the page.

    Raises:
        BadInput: no page can be written there, or it would replace a file that is no report.
    """
    if output is not None:
        target = Path(output)
        if target.suffix.lower() not in PAGE_ENDINGS or target.is_dir() or not target.parent.is_dir():
            raise BadInput(
                f"-o {output} is no place for a page; name a file that ends in .html, in a folder that exists."
            )
        return target
    folders = {search.file.parent for search in searches} | {run.folder for run in runs}
    home = folders.pop() if len(folders) == 1 else Path()
    home = Path() if get_remote_url(home) else home
    # One more file would make a checkpoint differ from its manifest.
    target = (home.parent if checkpoint_step(home) is not None else home) / DEFAULT_NAME
    for path in (target, target.with_suffix(".png")):
        if path.exists() and not (path.is_file() and MARK in path.read_bytes()[:HEAD_BYTES]):
            raise BadInput(f"{path} exists and is not a report of littrainer; give another place with -o FILE.html.")
    return target
