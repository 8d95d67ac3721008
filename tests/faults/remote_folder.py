"""A run whose output_dir is an address, on a file system in memory that lies, moved from machine to machine.

    python -m tests.faults.remote_folder                  200 schedules
    python -m tests.faults.remote_folder --schedules 600 --seed 1

Each schedule has one kind of fault, at random calls of the file system. A training of six steps saves at steps 2, 4 and
6; up to three machines train it, each until it is stopped, has finished, or ends with an error, which has to name the
address. A machine begins with an empty disk or with that of the one before, on which the clock has gone back. Then a
machine without faults trains to the end: the weights have to be those of a run that was never stopped, bit for bit.
After each machine every checkpoint that has a manifest at the address has to be whole, and the next machine has to find
the newest of them or a newer one.

Lost threads are uploads that end by an exception that is no Exception. Without the right to delete, what is complete
stays complete. Hostile keys are names that lead out of a folder, in a checkpoint and in a manifest, and a marker that
holds anything: nothing is written where they lead.

A part of the schedules begins with what is at the address already: the checkpoint-1 of an older run, whose checkpoints
are not limited here, and a checkpoint-9 without a manifest, which somebody copied there. Both have to be there in the
end. In a part a second run begins to upload to the address in the middle of the first machine's training.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import fsspec
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem

from littrainer import TrainerCallback, get_last_checkpoint
from littrainer.checkpoint.checksums import MANIFEST_NAME, parse_manifest
from littrainer.checkpoint.layout import checkpoint_step
from littrainer.checkpoint.remote import MARKER_NAME, RemoteRun
from littrainer.runtime.remote_folder import local_folder
from tests.faults.damage import STEPS, build_trainer, is_equal, quiet, stop_at, weights_of

LIBRARY = "littrainer"
KINDS = (
    *("errors", "torn writes with an error", "torn writes without", "late listings", "slow", "cut off"),
    *("short reads", "refused deletes", "lost threads", "hostile keys"),
)
MACHINES = 3
HOSTILE, ESCAPED = "checkpoint-7", "escaped"


class LyingFileSystem(MemoryFileSystem):
    """Objects in memory, of which a plan makes some calls go wrong.

    Attributes:
        kind: of the faults; None if there are none.
        chance: of a fault at one call.
        calls_left: until the machine is cut off.
        faults: how many there were.
    """

    protocol = "lying"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    listings: ClassVar[dict[str, list[list[str]]]] = {}
    kind: ClassVar[str | None] = None
    chance: ClassVar[float] = 0.0
    calls_left: ClassVar[int] = 0
    faults: ClassVar[int] = 0
    moments: ClassVar[random.Random] = random.Random(0)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("lying://"))

    def goes_wrong(self, *kinds: str) -> bool:
        """Return whether this call has a fault of one of these kinds; errors and cut lines are raised."""
        cls = LyingFileSystem
        cls.calls_left -= 1
        if cls.kind == "cut off" and cls.calls_left < 0:
            cls.faults += 1
            raise ConnectionError("the line is cut")
        if cls.kind is None or cls.moments.random() >= cls.chance:
            return False
        if cls.kind == "errors":
            cls.faults += 1
            raise random.choice([OSError, ConnectionError, TimeoutError, RuntimeError])("503 Slow Down")
        cls.faults += cls.kind in (*kinds, "slow")
        if cls.kind == "slow":
            time.sleep(0.003)
        return cls.kind in kinds

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        is_short = self.goes_wrong("short reads")
        content = super().cat_file(path, start, end, **kwargs)
        return content[: self.moments.randrange(1 + len(content))] if is_short else content

    def get_file(self, rpath: str, lpath: Any = None, *args: Any, **kwargs: Any) -> None:
        content = self.cat_file(rpath)
        Path(lpath).write_bytes(content)

    def put_file(self, lpath: Any, rpath: str, *args: Any, **kwargs: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        is_torn = self.goes_wrong(*KINDS[1:3])
        if self.kind == "lost threads" and self.goes_wrong("lost threads"):
            raise asyncio.CancelledError
        super().pipe_file(path, value[: len(value) // 2] if is_torn else value, mode, **kwargs)
        if is_torn and self.kind == KINDS[1]:
            raise ConnectionError("the connection was reset")

    def info(self, path: str, **kwargs: Any) -> Any:
        if self.goes_wrong("late listings"):
            raise FileNotFoundError(path)
        return super().info(path, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        """List as at some moment before, if that is the fault."""
        earlier = self.listings.setdefault(path, [])
        if not self.goes_wrong("late listings"):
            with contextlib.suppress(FileNotFoundError):
                earlier.append(super().ls(path, detail=False))
            return super().ls(path, detail=detail, **kwargs)
        if not earlier:
            raise FileNotFoundError(path)
        return self.moments.choice(earlier)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete what a listing shows: with a late one only a part."""
        if self.kind == "refused deletes" and self.goes_wrong("refused deletes"):
            raise PermissionError("DeleteObject is not allowed")
        whole = self._strip_protocol(path)
        found = sorted(name for name in self.store if name == whole or name.startswith(f"{whole}/"))
        is_late = len(found) > 1 and self.goes_wrong("late listings")
        for name in found[::2] if is_late else found:
            self._rm(name)


fsspec.register_implementation("lying", LyingFileSystem, clobber=True)


def checked_checkpoints() -> tuple[int, list[str]]:
    """Return the newest step that is complete at the address, and the objects that are not as their manifests say."""
    store = {name: file.getvalue() for name, file in LyingFileSystem.store.items()}
    newest, found = 0, []
    for path in [name for name in store if name.endswith(f"/{MANIFEST_NAME}")]:
        if HOSTILE in path:
            continue
        folder = path.removesuffix(MANIFEST_NAME)
        try:
            files = parse_manifest(store[path]).files
        except ValueError:
            # Seen as torn by whoever reads it.
            continue
        newest = max(newest, checkpoint_step(folder) or 0)
        for name, record in files.items():
            content = store.get(f"{folder}{name}", b"")
            if (len(content), zlib.crc32(content)) != (record.size, record.crc32):
                found.append(f"{folder}{name}")
    return newest, found


@contextlib.contextmanager
def machine(disk: Path) -> Iterator[None]:
    """Train in the block with a disk, on which newer checkpoints have earlier times than older ones."""
    for age, folder in enumerate(sorted(disk.rglob("checkpoint-*"))):
        if folder.is_dir():
            os.utime(folder, (1_000_000_000 - 1000 * age,) * 2)
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(disk)}), quiet():
        yield


OLDER, COPIED = "checkpoint-1", "checkpoint-9"


def put_what_is_there(address: str, older: Path) -> dict[str, bytes]:
    """Upload the checkpoint of an older run, and a copied folder; return these objects."""
    files, path = url_to_fs(address)
    for file in (older / OLDER).iterdir():
        files.put_file(file, f"{path}/{OLDER}/{file.name}")
    files.pipe_file(f"{path}/{COPIED}/optimizer.pt", b"copied")
    return {name: file.getvalue() for name, file in LyingFileSystem.store.items()}


def put_what_is_hostile(address: str, moments: random.Random) -> None:
    """Put names that lead out of their folder, in a copied checkpoint and in a manifest, and an odd marker."""
    files, path = url_to_fs(address)
    out = "../" * moments.randrange(1, 9) + ESCAPED
    files.pipe_file(f"{path}/checkpoint-8/{moments.choice(['', 'a/', '/', './'])}{out}", b"hostile")
    files.pipe_file(f"{path}/checkpoint-8/model.safetensors", b"hostile")
    content = {"version": 1, "sequence": 10**30, "files": {out: {"size": 7, "crc32": "0"}}}
    content["crc32"] = f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
    files.pipe_file(f"{path}/{HOSTILE}/{MANIFEST_NAME}", json.dumps(content).encode())
    odd = [b'{"checkpoints": null}', b"[" * 200_000, b'{"checkpoints": ["../checkpoint-9", 1e400]}', b"5"]
    if moments.random() < 0.5:
        files.pipe_file(f"{path}/{MARKER_NAME}", moments.choice(odd))


def is_any_unfinished() -> bool:
    return any(name.endswith(MANIFEST_NAME) and not file.getvalue() for name, file in LyingFileSystem.store.items())


class SecondRun(TrainerCallback):
    """Begins to upload to the address from another machine, at some step."""

    def __init__(self, step: int, address: str, disk: Path) -> None:
        self.step, self.address, self.disk = step, address, disk

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(self.disk)}):
                RemoteRun(Path(local_folder(self.address))).claim()


def outcome_of(number: int, seed: int, root: Path, expected: dict[str, torch.Tensor]) -> collections.Counter[str]:
    """Count what the machines of a schedule end with."""
    moments, cls, address = random.Random(f"{seed} {number}"), LyingFileSystem, f"lying://bucket/{seed}/{number}"
    cls.moments = moments
    for kept in (cls.store, cls.listings):
        kept.clear()
    counts: collections.Counter[str] = collections.Counter()
    was_unfinished = False
    disk, safe, second = root / f"{number}-0", 0, moments.randrange(3 * STEPS)
    # Of each kind of fault, every second schedule.
    cls.kind = None
    there = put_what_is_there(address, root / "older") if number // len(KINDS) % 2 else {}
    for attempt in range(MACHINES + 1):
        if attempt == MACHINES or moments.random() < 0.5:
            disk = root / f"{number}-{attempt}"
        cls.kind = None if attempt == MACHINES else KINDS[number % len(KINDS)]
        cls.chance = moments.choice([0.02, 0.1, 0.4])
        if cls.kind == "hostile keys":
            put_what_is_hostile(address, moments)
        has_no_right = cls.kind == "refused deletes" and moments.random() < 0.5
        cls.chance = 1.0 if has_no_right else cls.chance
        cls.calls_left = moments.randrange(120)
        stopped_at = STEPS if attempt == MACHINES else moments.randrange(2, STEPS + 2)
        limit = None if there else moments.choice([1, 2, None])
        saves = {"save_total_limit": limit, "async_save": moments.random() < 0.5}
        try:
            with machine(disk):
                trainer = build_trainer(LIBRARY, address, **saves)  # type: ignore[arg-type]
                trainer.add_callback(stop_at(LIBRARY, stopped_at))
                if attempt == 0 and second < STEPS:
                    trainer.add_callback(SecondRun(second, address, root / f"{number}-second"))
                found = get_last_checkpoint(trainer.args.output_dir)
                if found is None or (checkpoint_step(found) or 0) < safe:
                    counts["a checkpoint lost"] += safe > 0
                trainer.train(resume_from_checkpoint=found is not None)
            counts["machines that resumed"] += found is not None
        except Exception as error:
            counts["error that names the address" if address in str(error) else f"unclear error: {error!r}"] += 1
        cls.kind = None
        # A second run leaves uploads of the first one half done.
        if has_no_right and not was_unfinished and not (attempt == 0 and second < STEPS):
            counts["emptied without the right to delete"] += is_any_unfinished()
        was_unfinished = is_any_unfinished()
        safe, torn = checked_checkpoints()
        if torn:
            counts[f"torn, with a manifest: {torn}"] += 1
    store = {name: file.getvalue() for name, file in cls.store.items()}
    counts["deleted or changed what was there"] += not there.items() <= store.items()
    counts["written outside of the folder"] += len([*root.rglob(f"{ESCAPED}*")])
    counts["schedules with an older run's and a copied checkpoint"] += bool(there)
    counts["exact" if is_equal(weights_of(trainer), expected) else "different"] += 1
    return counts


def run_schedules(schedules: int, seed: int) -> dict[str, collections.Counter[str]]:
    """Return for each kind of fault how often what happened."""
    results: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with quiet():
            whole = build_trainer(LIBRARY, root / "whole")
            whole.train()
            build_trainer(LIBRARY, root / "older", save_steps=1).train()
        for number in range(schedules):
            LyingFileSystem.faults = 0
            counts = outcome_of(number, seed, root, weights_of(whole))
            results[KINDS[number % len(KINDS)]] += counts + collections.Counter(faults=LyingFileSystem.faults)
    return results


# Everything else is a failure.
FINE = {
    "exact",
    "faults",
    "machines that resumed",
    "error that names the address",
    "schedules with an older run's and a copied checkpoint",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="which moments (default: 0)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    results = run_schedules(options.schedules, options.seed)
    for kind, counts in results.items():
        print(f"{kind}: {dict(counts)}")
    if wrong := {name for counts in results.values() for name in +counts} - FINE:
        sys.exit(f"not as it should be: {', '.join(sorted(wrong))}")


if __name__ == "__main__":
    main()
