"""What a push sends, as it is at that step: training goes on to delete checkpoints and to write into output_dir.

Large files are linked, which takes no time and no room, if nothing writes into them while they are sent: a complete
checkpoint, and output_dir while the script waits for a push. Else they are copied, mostly by the thread that sends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from littrainer.checkpoint.checksums import MANIFEST_NAME
from littrainer.checkpoint.distributed_resume import LAST_CHECKPOINT
from littrainer.checkpoint.layout import (
    LIGHTNING_STATE_NAME,
    OPTIMIZER_NAME,
    OPTIMIZER_PARTS,
    PREFIX_CHECKPOINT_DIR,
    RUN_RECORD_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    STACKS_NAME,
    TRAINER_STATE_NAME,
    WEIGHT_PARTS,
)
from littrainer.checkpoint.run_lock import give_back_claim, is_abandoned, take_claim

CARD_NAME = "README.md"
# Next to the checkpoints, on the same file system.
SNAPSHOT_DIR = ".littrainer_push"
# Of output_dir: what is not the model, belongs to another push, or is being written. The first two are transformers'.
NEVER_PUSHED = (
    *("_*", f"{PREFIX_CHECKPOINT_DIR}-*", f"*/{PREFIX_CHECKPOINT_DIR}-*/*", f"{LAST_CHECKPOINT}/*"),
    *(".littrainer_*", "*/.littrainer_*", RUN_RECORD_NAME, f"*/{RUN_RECORD_NAME}", STACKS_NAME),
    *("*.unfinished", "*.unfinished-*", "*.incomplete", "*.lock", "*.tmp", "*~", "*.swp", "*__pycache__/*"),
    *(".unfinished/*", "*/.unfinished/*", ".git/*", "*/.git/*", ".cache/*", "*/.cache/*"),
)
# Of a checkpoint: what only resuming needs, and no one who loads the model; and the template of a card that PEFT writes
# into each, though output_dir has the card.
ONLY_TO_RESUME = (
    *(CARD_NAME, OPTIMIZER_NAME, *OPTIMIZER_PARTS, *WEIGHT_PARTS, SCHEDULER_NAME, SCALER_NAME, TRAINER_STATE_NAME),
    *("rng_state*.pth", "littrainer_resume*.pt", LIGHTNING_STATE_NAME, MANIFEST_NAME, "latest", "zero_to_fp32.py"),
)
# Bytes up to which a file is copied, for it may be written into in place; beyond it a link has to do.
COPIED_BYTES = 16 << 20


def take_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Take a whole checkpoint into a folder."""
    for name in _files_in(checkpoint):
        _take(checkpoint / name, folder / name)


def take_model(checkpoint: Path, folder: Path) -> None:
    """Take of a checkpoint what loads the model into a folder, which is made even if that is nothing."""
    folder.mkdir(parents=True)
    for name in _files_in(checkpoint):
        if not any(fnmatch(name, pattern) for pattern in ONLY_TO_RESUME):
            _take(checkpoint / name, folder / name)


def take_beside_model(output_dir: Path, folder: Path, links: bool = False) -> None:
    """Add the other files of output_dir, such as card and logs, to a folder that may have a checkpoint's model.

    Files that are there already stay, since the model in output_dir is an earlier one. Links will do if nothing writes
    into output_dir until it is sent.
    """
    # A folder with this file is a checkpoint of a `lightning.Trainer`, whose name is up to its user.
    for name in _files_in(output_dir, is_left_out=lambda folder: (folder / LIGHTNING_STATE_NAME).is_file()):
        if (folder / name).exists() or any(fnmatch(name, pattern) for pattern in NEVER_PUSHED):
            continue
        # A callback may delete one meanwhile.
        with contextlib.suppress(FileNotFoundError):
            _take(output_dir / name, folder / name, os.symlink if links else None)


def new_snapshot(output_dir: Path, name: str) -> Path:
    """Make the folder of one push, which other runs in output_dir leave alone as long as this process lives."""
    return take_claim(output_dir / SNAPSHOT_DIR / f"{name}-{uuid.uuid4().hex[:8]}")


@contextlib.contextmanager
def filled_snapshot(output_dir: Path, name: str) -> Iterator[Path]:
    """A block that fills the folder of one push, which goes again if that fails, as on a full disk."""
    place = new_snapshot(output_dir, name)
    try:
        yield place
    except BaseException:
        remove_snapshots(place)
        raise


def remove_abandoned_snapshots(output_dir: Path) -> None:
    """Remove what runs that were killed left of their pushes, and nothing of one that goes on."""
    for folder in sorted((output_dir / SNAPSHOT_DIR).glob("*")):
        # On a file system without locks it is not known whose the folder is, so that it stays.
        if is_abandoned(folder):
            remove_snapshots(folder)


def remove_snapshots(*folders: Path) -> None:
    """Remove snapshots, and the folder of all with the last one."""
    for folder in folders:
        give_back_claim(folder)
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


def _files_in(folder: Path, is_left_out: Callable[[Path], bool] = lambda folder: False) -> Iterator[str]:
    """Return paths of the files below a folder, but for what is below one in it that is left out."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        # Neither is it walked through nor does a snapshot hold another one.
        folders[:] = [name for name in folders if name != SNAPSHOT_DIR and not is_left_out(Path(parent, name))]
        for name in sorted(names):
            if Path(parent, name).is_file():
                yield Path(parent, name).relative_to(folder).as_posix()


def _take(source: Path, target: Path, link: Callable[[Path, Path], None] | None = os.link) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if link is not None and source.stat().st_size > COPIED_BYTES:
        with contextlib.suppress(OSError):
            # A link to a link would end where that is deleted.
            link(source.resolve(), target)
            return
    shutil.copyfile(source, target)
