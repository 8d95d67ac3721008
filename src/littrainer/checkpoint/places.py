"""Which process writes the checkpoints on which disk, where several processes train together.

By default the first process writes them, and with `save_on_each_node` the first one of each node. Whether two processes
mean the same folder cannot be told from its path: nodes may share a disk or not, and a path may be another one in each
process, as where a script puts the time into it. So it is tried out, once for each folder.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from littrainer.distributed.agreement import are_several, failing_together, from_each, wait_for_each_other

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

TOKEN = ".littrainer_disk_"
# How long another node's file may take to be seen on a shared disk.
SECONDS_UNTIL_A_FILE_IS_SEEN = 1.0


class Place(NamedTuple):
    """Where this process's checkpoints lie.

    Parameters:
        leader: the process that writes the checkpoints of this process's disk; None where this process sees none.
        leads: whether it is this process.
        has_own_folder: whether this process writes its files into a folder of its own, from which they are brought to
            the checkpoint.
        some_have_own_folder: whether any process does.
    """

    leader: int | None
    leads: bool
    has_own_folder: bool
    some_have_own_folder: bool


_places: WeakKeyDictionary[Trainer, dict[str, Place]] = WeakKeyDictionary()


def place_of(trainer: Trainer, run_dir: Path) -> Place:
    """Where this process's checkpoints lie; all processes call this at the same place.

    Parameters:
        run_dir: the folder that holds this training's checkpoints; it is made where it is not there.

    Raises:
        OSError: it cannot be written to.
        RuntimeError: it has been deleted meanwhile.
    """
    args = trainer.args
    if not are_several():
        return Place(0, args.should_save, False, False)
    known = _places.setdefault(trainer, {})
    if str(run_dir) not in known:
        known[str(run_dir)] = _tried_out(run_dir, args.process_index, args.should_save or args.process_index == 0)
        _warn_of_nodes_that_share(known[str(run_dir)], args.process_index, args.should_save)
    return known[str(run_dir)]


def leads(trainer: Trainer, run_dir: str | Path) -> bool:
    """Whether this process writes, and deletes, the checkpoints of its disk, as `place_of` has it."""
    return place_of(trainer, Path(run_dir)).leads


def not_writable(run_dir: Path, error: OSError) -> OSError:
    """The error for a folder of checkpoints that cannot be written to."""
    return OSError(
        error.errno,
        f"No checkpoint can be written to {run_dir} ({error.strerror}). Give an output_dir that can be written to, or "
        "train with save_strategy='no'",
        str(run_dir),
    )


def _tried_out(run_dir: Path, rank: int, writes: bool) -> Place:
    token = run_dir / f"{TOKEN}{uuid.uuid4().hex}"
    try:
        with failing_together(f"preparing {run_dir} for checkpoints"):
            if writes:
                try:
                    run_dir.mkdir(parents=True, exist_ok=True)
                    token.touch()
                except OSError as error:
                    raise not_writable(run_dir, error) from error
        tokens = {other: name for other, name in enumerate(from_each(token.name if writes else None)) if name}
        leader = _first_seen(run_dir, tokens)
        leads = leader == rank
        has_own_folder = leader is None or (writes and not leads)
        found = from_each((leads, has_own_folder))
        if not any(one_leads for one_leads, _ in found):
            raise RuntimeError(
                f"{run_dir} was deleted or moved while {len(found)} processes were preparing it for checkpoints, so "
                "none of them could write one. Let the script delete earlier results in one process, before the "
                "Trainer is made, and start again."
            )
    finally:
        with contextlib.suppress(OSError):
            token.unlink()
    # Nobody goes on to look into the folder while tokens are in it.
    wait_for_each_other()
    return Place(leader, leads, has_own_folder, any(has_own for _, has_own in found))


def _first_seen(run_dir: Path, tokens: dict[int, str]) -> int | None:
    first = min(tokens)
    deadline = time.monotonic() + SECONDS_UNTIL_A_FILE_IS_SEEN
    while not (run_dir / tokens[first]).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return next((rank for rank, name in tokens.items() if (run_dir / name).exists()), None)


def _warn_of_nodes_that_share(place: Place, rank: int, should_save: bool) -> None:
    if should_save and not place.leads:
        logger.warning(
            "save_on_each_node=True, and process %d writes to the same disk as process %s: one of them writes the "
            "checkpoints. Leave save_on_each_node at False where nodes share a disk.",
            rank,
            place.leader,
        )
