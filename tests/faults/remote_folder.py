"""A run whose output_dir is a URL, on an unreliable file system in memory, moved from machine to machine.

    python -m tests.faults.remote_folder                  200 schedules
    python -m tests.faults.remote_folder --schedules 600 --seed 1

Each schedule has a kind of fault at random calls of the file system. A training of six steps saves at steps 2, 4 and 6;
up to three machines train it until they are stopped, finish, or end with an error, which must name the URL. A machine
has an empty disk, or the previous disk with a clock that was set back. Then a machine without faults trains to the end:
the weights must be those of an uninterrupted run, bit for bit. After each machine every checkpoint with a manifest at
the URL must be complete, and the next machine must find the newest of them or a newer checkpoint.

Lost threads are uploads that end with an exception that is no Exception. Without the right to delete, complete
checkpoints stay complete. Hostile keys are paths out of a folder, in a checkpoint and in a manifest, and an invalid
marker: nothing is written to these paths.

Some schedules begin with checkpoint-1 of an older run, with no limit on checkpoints, and with a copied checkpoint-9
without manifest; both must remain. In some a second run begins to upload to the URL during the first training.
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


class UnreliableFileSystem(MemoryFileSystem):
    """A file system in memory with faults in random calls.

    Attributes:
        kind: the kind of the faults, or None.
        chance: the probability of a fault in a call.
        remaining_calls: calls until the machine is disconnected.
        faults: the number of faults.
    """

    protocol = "unreliable"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    listings: ClassVar[dict[str, list[list[str]]]] = {}
    kind: ClassVar[str | None] = None
    chance: ClassVar[float] = 0.0
    remaining_calls: ClassVar[int] = 0
    faults: ClassVar[int] = 0
    moments: ClassVar[random.Random] = random.Random(0)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("unreliable://"))

    def has_fault(self, *kinds: str) -> bool:
        """Return whether this call has a fault of these kinds; raise errors and disconnections."""
        cls = UnreliableFileSystem
        cls.remaining_calls -= 1
        if cls.kind == "cut off" and cls.remaining_calls < 0:
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
        is_short = self.has_fault("short reads")
        content = super().cat_file(path, start, end, **kwargs)
        return content[: self.moments.randrange(1 + len(content))] if is_short else content

    def get_file(self, rpath: str, lpath: Any = None, *args: Any, **kwargs: Any) -> None:
        content = self.cat_file(rpath)
        Path(lpath).write_bytes(content)

    def put_file(self, lpath: Any, rpath: str, *args: Any, **kwargs: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        is_torn = self.has_fault(*KINDS[1:3])
        if self.kind == "lost threads" and self.has_fault("lost threads"):
            raise asyncio.CancelledError
        super().pipe_file(path, value[: len(value) // 2] if is_torn else value, mode, **kwargs)
        if is_torn and self.kind == KINDS[1]:
            raise ConnectionError("the connection was reset")

    def info(self, path: str, **kwargs: Any) -> Any:
        if self.has_fault("late listings"):
            raise FileNotFoundError(path)
        return super().info(path, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        """List names, with a fault as at an earlier time."""
        earlier = self.listings.setdefault(path, [])
        if not self.has_fault("late listings"):
            with contextlib.suppress(FileNotFoundError):
                earlier.append(super().ls(path, detail=False))
            return super().ls(path, detail=detail, **kwargs)
        if not earlier:
            raise FileNotFoundError(path)
        return self.moments.choice(earlier)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete listed objects; with a late listing only some of them."""
        if self.kind == "refused deletes" and self.has_fault("refused deletes"):
            raise PermissionError("DeleteObject is not allowed")
        root = self._strip_protocol(path)
        names = sorted(name for name in self.store if name == root or name.startswith(f"{root}/"))
        is_late = len(names) > 1 and self.has_fault("late listings")
        for name in names[::2] if is_late else names:
            self._rm(name)


fsspec.register_implementation("unreliable", UnreliableFileSystem, clobber=True)


def check_checkpoints() -> tuple[int, list[str]]:
    """Return the newest complete step at the URL, and the objects that differ from their manifests."""
    store = {name: file.getvalue() for name, file in UnreliableFileSystem.store.items()}
    newest, torn = 0, []
    for path in [name for name in store if name.endswith(f"/{MANIFEST_NAME}")]:
        if HOSTILE in path:
            continue
        folder = path.removesuffix(MANIFEST_NAME)
        try:
            files = parse_manifest(store[path]).files
        except ValueError:
            # Readers notice the torn manifest.
            continue
        newest = max(newest, checkpoint_step(folder) or 0)
        for name, record in files.items():
            content = store.get(f"{folder}{name}", b"")
            if (len(content), zlib.crc32(content)) != (record.size, record.crc32):
                torn.append(f"{folder}{name}")
    return newest, torn


@contextlib.contextmanager
def machine(disk: Path) -> Iterator[None]:
    """Set a machine's disk during the block, with earlier times for newer checkpoints."""
    for age, folder in enumerate(sorted(disk.rglob("checkpoint-*"))):
        if folder.is_dir():
            os.utime(folder, (1_000_000_000 - 1000 * age,) * 2)
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(disk)}), quiet():
        yield


OLDER, COPIED = "checkpoint-1", "checkpoint-9"


def upload_existing_objects(address: str, older: Path) -> dict[str, bytes]:
    """Upload an older run's checkpoint and a copied folder; return the objects."""
    files, path = url_to_fs(address)
    for file in (older / OLDER).iterdir():
        files.put_file(file, f"{path}/{OLDER}/{file.name}")
    files.pipe_file(f"{path}/{COPIED}/optimizer.pt", b"copied")
    return {name: file.getvalue() for name, file in UnreliableFileSystem.store.items()}


def upload_hostile_objects(address: str, moments: random.Random) -> None:
    """Upload a checkpoint and a manifest with paths out of their folder, and an invalid marker."""
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


def has_incomplete_manifest() -> bool:
    return any(
        name.endswith(MANIFEST_NAME) and not file.getvalue() for name, file in UnreliableFileSystem.store.items()
    )


class SecondRun(TrainerCallback):
    """A callback that starts a second run at the URL at a step."""

    def __init__(self, step: int, address: str, disk: Path) -> None:
        self.step, self.address, self.disk = step, address, disk

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(self.disk)}):
                RemoteRun(Path(local_folder(self.address))).claim()


def outcome_of(number: int, seed: int, root: Path, expected: dict[str, torch.Tensor]) -> collections.Counter[str]:
    """Count the outcomes of a schedule's machines."""
    moments, cls = random.Random(f"{seed} {number}"), UnreliableFileSystem
    address = f"unreliable://bucket/{seed}/{number}"
    cls.moments = moments
    cls.store.clear()
    cls.listings.clear()
    counts: collections.Counter[str] = collections.Counter()
    was_incomplete = False
    disk, safe, second = root / f"{number}-0", 0, moments.randrange(3 * STEPS)
    # In every second schedule of each kind of fault.
    cls.kind = None
    existing = upload_existing_objects(address, root / "older") if number // len(KINDS) % 2 else {}
    for attempt in range(MACHINES + 1):
        if attempt == MACHINES or moments.random() < 0.5:
            disk = root / f"{number}-{attempt}"
        cls.kind = None if attempt == MACHINES else KINDS[number % len(KINDS)]
        cls.chance = moments.choice([0.02, 0.1, 0.4])
        if cls.kind == "hostile keys":
            upload_hostile_objects(address, moments)
        has_no_right = cls.kind == "refused deletes" and moments.random() < 0.5
        cls.chance = 1.0 if has_no_right else cls.chance
        cls.remaining_calls = moments.randrange(120)
        stopped_at = STEPS if attempt == MACHINES else moments.randrange(2, STEPS + 2)
        limit = None if existing else moments.choice([1, 2, None])
        saves = {"save_total_limit": limit, "async_save": moments.random() < 0.5}
        try:
            with machine(disk):
                trainer = build_trainer(LIBRARY, address, **saves)  # type: ignore[arg-type]
                trainer.add_callback(stop_at(LIBRARY, stopped_at))
                if attempt == 0 and second < STEPS:
                    trainer.add_callback(SecondRun(second, address, root / f"{number}-second"))
                newest = get_last_checkpoint(trainer.args.output_dir)
                if newest is None or (checkpoint_step(newest) or 0) < safe:
                    counts["a checkpoint lost"] += safe > 0
                trainer.train(resume_from_checkpoint=newest is not None)
            counts["machines that resumed"] += newest is not None
        except Exception as error:
            counts["error that names the address" if address in str(error) else f"unclear error: {error!r}"] += 1
        cls.kind = None
        # A second run interrupts uploads of the first.
        if has_no_right and not was_incomplete and not (attempt == 0 and second < STEPS):
            counts["emptied without the right to delete"] += has_incomplete_manifest()
        was_incomplete = has_incomplete_manifest()
        safe, torn = check_checkpoints()
        if torn:
            counts[f"torn, with a manifest: {torn}"] += 1
    store = {name: file.getvalue() for name, file in cls.store.items()}
    counts["deleted or changed existing objects"] += not existing.items() <= store.items()
    counts["written outside of the folder"] += len([*root.rglob(f"{ESCAPED}*")])
    counts["schedules with an older run's and a copied checkpoint"] += bool(existing)
    counts["exact" if is_equal(weights_of(trainer), expected) else "different"] += 1
    return counts


def run_schedules(schedules: int, seed: int) -> dict[str, collections.Counter[str]]:
    """Return counts of outcomes for each kind of fault."""
    results: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with quiet():
            uninterrupted = build_trainer(LIBRARY, root / "uninterrupted")
            uninterrupted.train()
            build_trainer(LIBRARY, root / "older", save_steps=1).train()
        for number in range(schedules):
            UnreliableFileSystem.faults = 0
            counts = outcome_of(number, seed, root, weights_of(uninterrupted))
            results[KINDS[number % len(KINDS)]] += counts + collections.Counter(faults=UnreliableFileSystem.faults)
    return results


# Outcomes that are no failures.
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
