"""Runs on full disks of increasing size, so that each write of a checkpoint fails once.

    python -m tests.faults.full_disk              where mounting is allowed
    unshare -rm python -m tests.faults.full_disk  elsewhere on Linux

Each disk is a tmpfs with a number of pages. A training of six steps saves at steps 2, 4 and 6 until it fails. The error
must name checkpoint, file and free space; every checkpoint must be intact; and after the disk is enlarged, the resumed
training must end with the weights of an uninterrupted training.
"""

from __future__ import annotations

import collections
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from littrainer.checkpoint.verification import find_damage
from tests.faults.damage import build_trainer, is_equal, quiet, weights_of

PAGE = 4096
LIBRARY = "littrainer"


def mount(folder: Path, pages: int, options: str = "") -> None:
    """Mount or remount a disk with a number of pages."""
    size = f"{options}size={pages * PAGE}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], check=True)


def outcome_on(folder: Path, expected: dict[str, torch.Tensor]) -> tuple[str, str]:
    """Train on a mounted disk; return the outcome, and the file that did not fit."""
    trainer, file = build_trainer(LIBRARY, folder / "run"), ""
    try:
        with quiet():
            trainer.train()
        return "fits", file
    except OSError as error:
        text = str(error)
        file = Path(error.filename or "").name
        if not all(part in text for part in ("No space left", "checkpoint-", "bytes are free")) or not file:
            return f"unclear error: {text}", file
    except Exception as error:
        return f"other error: {error!r}", file
    checkpoints = sorted((folder / "run").glob("checkpoint-*"))
    if any(find_damage(checkpoint) for checkpoint in checkpoints):
        return "torn checkpoint", file
    if any((folder / "run").glob(".*")):
        return "incomplete files remain", file
    mount(folder, 100_000, "remount,")
    resumed = build_trainer(LIBRARY, folder / "run")
    with quiet():
        resumed.train(resume_from_checkpoint=bool(checkpoints))
    return ("exact after a clear error" if is_equal(weights_of(resumed), expected) else "different"), file


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as root:
        uninterrupted, disk = Path(root, "uninterrupted"), Path(root, "disk")
        with quiet():
            trainer = build_trainer(LIBRARY, uninterrupted)
            trainer.train()
        expected = weights_of(trainer)
        files = [path for path in (uninterrupted / "checkpoint-2").rglob("*") if path.is_file()]
        checkpoint_pages = sum(-(-path.stat().st_size // PAGE) for path in files)
        disk.mkdir()
        counts: collections.Counter[str] = collections.Counter()
        failed_at: collections.Counter[str] = collections.Counter()
        # From no space for the first checkpoint to space for all except the last page of the third.
        for pages in range(2, 3 * checkpoint_pages + 4):
            mount(disk, pages)
            try:
                outcome, file = outcome_on(disk, expected)
            finally:
                subprocess.run(["umount", str(disk)], check=True)
            counts[outcome] += 1
            failed_at[file] += 1
        del failed_at[""]
        print(f"{sum(counts.values())} disks: {dict(counts)}")
        print(f"failed at: {dict(failed_at)}")
    wrong = counts.keys() - {"exact after a clear error", "fits"}
    if wrong:
        sys.exit(f"not as it should be: {', '.join(sorted(wrong))}")


if __name__ == "__main__":
    main()
