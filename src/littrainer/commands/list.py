"""The command `littrainer list`: shows the trainings below a folder."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from littrainer.callbacks.log_history import EVALUATION
from littrainer.callbacks.state import COMPLETED
from littrainer.checkpoint.layout import RUN_RECORD_NAME, TRAINER_STATE_NAME, checkpoint_step
from littrainer.commands.command_line import BadInput, CommandParser
from littrainer.commands.report_folders import LIGHTNING_LOG_NAME, MissingState, Run, load_folders

# CSVLogger writes this file next to its metrics.csv, which is a common name.
LIGHTNING_HPARAMS_NAME = "hparams.yaml"
COLUMNS = ("NAME", "DATE", "STEPS", "BEST METRIC", "END")
UNKNOWN = "-"
DESCRIPTION = """\
List the trainings below a folder, the newest last: name, date, optimizer steps, best metric, and why each ended. The
command also reads folders that transformers wrote, and those of Lightning's CSVLogger.
"""


@dataclass
class RunSummary:
    """Training as a row of the list; unknown values are None.

    Parameters:
        name: folder, relative to the listed folder.
        date: start of the training, or the last change of its state, in ISO format.
        step, max_steps: optimizer steps done and planned.
        metric, best, best_step: the metric that ranks evaluations, its best value, and the step of that value.
        end: why the training ended.
    """

    name: str
    date: str
    step: int | None = None
    max_steps: int | None = None
    metric: str | None = None
    best: float | None = None
    best_step: int | None = None
    end: str | None = None

    def format_cells(self) -> tuple[str, ...]:
        date = f"{datetime.datetime.fromisoformat(self.date):%Y-%m-%d %H:%M}"
        steps = UNKNOWN if self.step is None else f"{self.step}/{self.max_steps}".removesuffix("/None")
        best = UNKNOWN if self.best is None else f"{self.metric} {self.best:.4g} (step {self.best_step})"
        return self.name, date, steps, best, str(self.end or UNKNOWN)


def main(words: Sequence[str]) -> int:
    parser = CommandParser("list", DESCRIPTION)
    parser.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="default: the working directory")
    parser.add_argument("--json", action="store_true", help="write a JSON list")
    options = parser.parse_args(words)
    folder = Path(options.folder)
    if not folder.is_dir():
        raise BadInput(f"{options.folder} is no folder of this machine; give one that has trainings below it.")
    summaries = sorted((summarize_run(run, folder) for run in find_run_folders(folder)), key=_get_date)
    if options.json:
        print(json.dumps([asdict(summary) for summary in summaries], indent=2))
    elif not summaries:
        print(f"no training below {folder}")
    else:
        rows = [COLUMNS, *(summary.format_cells() for summary in summaries)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _get_date(summary: RunSummary) -> datetime.datetime:
    return datetime.datetime.fromisoformat(summary.date)


def find_run_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of trainings, from top to bottom, without their checkpoints."""
    for path, folders, files in os.walk(folder):
        checkpoints = [name for name in folders if checkpoint_step(Path(name)) is not None]
        folders[:] = sorted(name for name in folders if name not in checkpoints and not name.startswith("."))
        is_lightning = {LIGHTNING_LOG_NAME, LIGHTNING_HPARAMS_NAME} <= {*files}
        if checkpoints or is_lightning or not {RUN_RECORD_NAME, TRAINER_STATE_NAME}.isdisjoint(files):
            yield Path(path)


def summarize_run(folder: Path, root: Path) -> RunSummary:
    """Read the summary of a training, as far as its files are readable."""
    recorded, changed = _read_start_and_end(folder), folder
    summary = RunSummary(os.path.relpath(folder, root), "")
    try:
        runs, _ = load_folders([str(folder)])
        for run in runs:
            changed = run.state_file
            _add_state(summary, run)
    except MissingState:
        # The training has not saved yet.
        pass
    except BadInput:
        summary.end = "not readable"
    modified = datetime.datetime.fromtimestamp(changed.stat().st_mtime).astimezone()
    summary.date = recorded.get("started") or modified.isoformat(sep=" ", timespec="seconds")
    if "end" in recorded:
        summary.step, summary.end = recorded["end"]["step"], recorded["end"]["reason"]
    elif "started" in recorded:
        # Loads torch.
        from littrainer.checkpoint.store import is_abandoned

        # An older state is of an earlier training in the folder.
        is_new = modified >= datetime.datetime.fromisoformat(recorded["started"])
        is_complete = is_new and summary.step is not None and summary.step == summary.max_steps
        summary.end = "running" if not is_abandoned(folder) else COMPLETED if is_complete else "killed"
    return summary


def _add_state(summary: RunSummary, run: Run) -> None:
    summary.step, summary.max_steps = run.state.global_step, run.state.max_steps or None
    summary.end = run.ending if run.state_file.name == TRAINER_STATE_NAME else None
    metric, source = run.deciding_curve
    best = run.best_points(metric, source)
    if best:
        summary.metric = metric if source == EVALUATION else f"{source}_{metric}"
        summary.best, summary.best_step = best[0].value, best[0].step


def _read_start_and_end(folder: Path) -> dict[str, Any]:
    """Return start and end of a run's record, without unreadable ones."""
    try:
        recorded = json.loads((folder / RUN_RECORD_NAME).read_text("utf-8"))["run"]
        started, end = recorded["started"], recorded.get("end")
        if datetime.datetime.fromisoformat(started).tzinfo is None:
            return {}
        end = {} if end is None else {"end": {"step": int(end["step"]), "reason": str(end["reason"])}}
        return {"started": started, **end}
    except (OSError, ValueError, LookupError, TypeError):
        return {}
