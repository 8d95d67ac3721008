"""The command `littrainer report`: writes a page and a picture of trainings and searches."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from littrainer.checkpoint.layout import RUN_RECORD_NAME, TRAINER_STATE_NAME, checkpoint_step
from littrainer.commands.command_line import BadInput, CommandParser
from littrainer.commands.report_charts import Chart, build_search_charts, build_training_charts, render_png
from littrainer.commands.report_folders import MissingState, Run, Search, load_folders
from littrainer.commands.report_page import render_page
from littrainer.runtime.atomic_files import write_atomically
from littrainer.runtime.remote_folder import RemoteFolderError, get_remote_url, local_folder
from littrainer.search.record import SEARCH_RECORD_NAME

DEFAULT_NAME = "report.html"
PAGE_ENDINGS = (".html", ".htm")
# Interval of --watch, and of reloads of an open page.
RELOAD_INTERVAL_S = 5
# Files with this mark in their first bytes may be overwritten.
MARK, HEAD_BYTES = b"littrainer report", 4096
REMOTE_FILES = (TRAINER_STATE_NAME, RUN_RECORD_NAME, SEARCH_RECORD_NAME, "config.json", "adapter_config.json")
DESCRIPTION = """\
Write what a training logged as one HTML page and one PNG picture: losses, metrics, learning rate, gradient norm, speed,
the best checkpoint, the environment, and the arguments that differ from their defaults. Several folders are drawn over
each other and compared. The output_dir of a hyperparameter search shows its trials. The command also reads the folders
that transformers wrote, and the metrics.csv that Lightning's CSVLogger wrote.
"""
ABOUT_OUTPUT = (
    "the page; the picture goes into the same folder (default: report.html in OUTPUT_DIR, or in the working directory "
    "for several, and for a URL)"
)
ABOUT_WATCH = (
    "follow a running training until Ctrl-C: write the page again with each checkpoint or trial; an open page loads "
    "itself again and keeps its settings"
)


def main(words: Sequence[str]) -> int:
    parser = CommandParser("report", DESCRIPTION)
    parser.add_argument(
        "folders", nargs="+", metavar="OUTPUT_DIR", help="output_dir, checkpoint, or URL such as s3://bucket/run"
    )
    parser.add_argument("-o", "--output", metavar="FILE.html", help=ABOUT_OUTPUT)
    parser.add_argument("--no-png", action="store_true", help="write the page alone")
    parser.add_argument("--watch", action="store_true", help=ABOUT_WATCH)
    options = parser.parse_args(words)
    try:
        if options.watch:
            _watch(options)
        # After --watch, write a page that does not reload.
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
    target = _get_target(runs, searches, options.output)
    charts: list[Chart] = []
    for number, search in enumerate(searches):
        charts += build_search_charts(search, f"search {number}")
    charts += build_training_charts(runs)
    write_atomically(target, render_page(runs, searches, charts, live_seconds))
    return target, charts


def _local_folders(folders: Sequence[str]) -> list[str]:
    """Return the folders, with local copies for URLs."""
    paths = []
    for folder in folders:
        try:
            path = local_folder(folder)
            if path != folder:
                # Loads torch.
                from littrainer.checkpoint.remote import download_small_files
                from littrainer.checkpoint.store import is_abandoned

                # A run on this machine has newer files than its URL.
                if is_abandoned(Path(path)):
                    path = str(download_small_files(Path(path), REMOTE_FILES))
        except (RemoteFolderError, ImportError, OSError, ValueError) as error:
            raise BadInput(str(error)) from error
        paths.append(path)
    return paths


def _write_picture(path: Path, charts: list[Chart]) -> None:
    try:
        write_atomically(path, render_png(charts))
    except ImportError:
        print("picture: not written; it needs matplotlib: pip install matplotlib")
    else:
        print(f"picture: {path}")


def _watch(options: argparse.Namespace) -> None:
    is_written = False
    print(f"waiting for changes in {', '.join(options.folders)}; Ctrl-C ends this", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            try:
                target, _ = _write_page(options, RELOAD_INTERVAL_S)
                if not is_written:
                    print(f"page: {target}", flush=True)
                is_written = True
            except BadInput as error:
                # The training may not have begun, or a checkpoint may be deleted meanwhile.
                if not is_written and not isinstance(error, MissingState):
                    raise
            time.sleep(RELOAD_INTERVAL_S)


def _get_target(runs: list[Run], searches: list[Search], output: str | None) -> Path:
    """Return the path of the page; raise BadInput if it is unusable, or a file that is no report."""
    if output is not None:
        target = Path(output)
        if target.suffix.lower() not in PAGE_ENDINGS or target.is_dir() or not target.parent.is_dir():
            raise BadInput(
                f"-o {output} is no place for a page; name a file that ends in .html, in a folder that exists."
            )
        return target
    folders = {search.file.parent for search in searches} | {run.folder for run in runs}
    folder = folders.pop() if len(folders) == 1 else Path()
    folder = Path() if get_remote_url(folder) else folder
    # Not into a checkpoint, which would then differ from its manifest.
    target = (folder.parent if checkpoint_step(folder) is not None else folder) / DEFAULT_NAME
    for path in (target, target.with_suffix(".png")):
        if path.exists() and not (path.is_file() and MARK in path.read_bytes()[:HEAD_BYTES]):
            raise BadInput(f"{path} exists and is not a report of littrainer; give another place with -o FILE.html.")
    return target
