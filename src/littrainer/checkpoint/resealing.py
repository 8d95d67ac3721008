"""The manifest of a checkpoint written anew, after someone has edited the checkpoint on purpose.

It is a command: `python -m littrainer.checkpoint.manifest runs/checkpoint-500`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from littrainer.checkpoint.manifest import (
    MANIFEST_NAME,
    DamagedManifest,
    Manifest,
    file_record,
    files_in,
    read_manifest,
    write_manifest,
)
from littrainer.checkpoint.names import LIGHTNING_STATE_NAME, TRAINER_STATE_NAME
from littrainer.checkpoint.sealing import to_disk
from littrainer.checkpoint.verification import NOT_READ, damage_by_format

COMMAND = "python -m littrainer.checkpoint.manifest"
# Nobody edits these with an editor, so that a changed one is more likely damaged than meant.
TENSORS = re.compile(r".*\.(safetensors|pt|pth|bin)")
STEP = re.compile(r".+-(\d+)")


class NotResealed(ValueError):
    """A manifest was not written anew; the one before is as it was."""


@dataclass
class Changes:
    """What became of a checkpoint's files since its earlier manifest; paths relative to its folder.

    Parameters:
        changed, added, gone: files that differ from the manifest, stand beside it, or only in it.
        compared: whether there was a readable manifest; without one every file is an added one.
    """

    changed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    compared: bool = True


def advice_after_editing(folder: Path) -> str:
    """The end of an error about damage: what to do where it is none; empty for a folder without a manifest."""
    if not (folder / MANIFEST_NAME).is_file():
        return ""
    return f" If you changed these files on purpose, write its manifest anew: {COMMAND} {folder}"


def reseal(folder: Path, tensors_too: bool = False) -> Changes:
    """Write the manifest of a checkpoint from its files as they are now; a failure leaves the earlier one.

    Parameters:
        tensors_too: also where files of tensors have changed, which is refused otherwise.

    Raises:
        NotResealed: the folder is no checkpoint, or a file of it is incomplete or, if of tensors, another one.
        OSError: a file cannot be read, or the manifest not be written.
    """
    states = (TRAINER_STATE_NAME, LIGHTNING_STATE_NAME)
    if not any((folder / name).is_file() for name in states):
        raise NotResealed(
            f"{folder} is no checkpoint: it has neither {' nor '.join(states)}. Give a checkpoint's folder."
        )
    # Where Lightning's state lies, a Trainer's is not needed.
    damage = [text for text in damage_by_format(folder) if text != f"{TRAINER_STATE_NAME} is missing."]
    if damage:
        raise NotResealed(f"{folder} is damaged: {' '.join(damage)} Correct this first, or use another checkpoint.")
    try:
        earlier = read_manifest(folder)
    except DamagedManifest:
        earlier = None
    records = {name: file_record(folder / name) for name in files_in(folder, with_links=True)}
    known = {} if earlier is None else earlier.files
    changes = Changes(
        changed=[name for name, record in records.items() if name in known and known[name] != record],
        added=[name for name in records if name not in known],
        gone=[name for name in known if name not in records],
        compared=earlier is not None,
    )
    suspicious = [name for name in changes.changed if TENSORS.fullmatch(name) and not NOT_READ.fullmatch(name)]
    if suspicious and not tensors_too:
        raise NotResealed(
            f"{', '.join(suspicious)} in {folder} changed since the checkpoint was written, and no editor does that: "
            "unless a script of yours wrote it, it is damaged, and another checkpoint is the one to use. If one did, "
            "add --tensors-too."
        )
    for name in (*changes.changed, *changes.added):
        to_disk(folder / name)
    write_manifest(folder, records, _sequence(folder, earlier))
    to_disk(folder)
    return changes


def _sequence(folder: Path, earlier: Manifest | None) -> int:
    # Without its own, its place among the checkpoints of the run is after those of lower steps: equal ones go by step.
    if earlier is not None:
        return earlier.sequence
    place, step = 0, _step(folder)
    for other in folder.resolve().parent.glob("*-*"):
        if other.is_dir() and _step(other) < step:
            try:
                manifest = read_manifest(other)
            except DamagedManifest:
                continue
            place = max(place, manifest.sequence if manifest is not None else 0)
    return place


def _step(folder: Path) -> int:
    match = STEP.fullmatch(folder.resolve().name)
    return int(match.group(1)) if match else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="Write the manifest of a checkpoint anew after its files were edited on purpose, and say what "
        "changed since the manifest before.",
    )
    parser.add_argument("folder", type=Path, help="the checkpoint's folder")
    parser.add_argument("--tensors-too", action="store_true", help="accept changed weights and states as well")
    options = parser.parse_args(arguments)
    try:
        changes = reseal(options.folder, options.tensors_too)
    except (NotResealed, OSError) as error:
        print(f"{error} {MANIFEST_NAME} was not written." if isinstance(error, NotResealed) else error, file=sys.stderr)
        return 1
    if changes.compared:
        for word in ("changed", "added", "gone"):
            for name in getattr(changes, word):
                print(f"{word}: {name}")
        if not (changes.changed or changes.added or changes.gone):
            print("Nothing had changed.")
    else:
        print("There was no readable manifest before, so what changed is not known.")
    print(f"{os.path.join(options.folder, MANIFEST_NAME)} is written.")
    return 0
