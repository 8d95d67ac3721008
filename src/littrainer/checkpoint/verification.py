"""Whether a checkpoint is intact: what damage there is to its files, and what was edited, each named."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import zipfile
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from littrainer.checkpoint.checksums import (
    DamagedManifest,
    FileRecord,
    Manifest,
    Stamp,
    file_record,
    read_manifest,
    readable_manifest,
    stamps_in,
)
from littrainer.checkpoint.layout import (
    ENGINE_PARTS,
    OPTIMIZER_NAME,
    OPTIMIZER_PARTS,
    RANDOM_STATE_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    WEIGHT_PARTS,
    WEIGHTS_NAME,
    checkpoint_step,
    shards_of,
)
from littrainer.errors.remote_folder import address_of, local_folder

logger = logging.getLogger(__name__)

STATES_OF_A_RESUME = (OPTIMIZER_NAME, SCHEDULER_NAME, RANDOM_STATE_NAME)
WEIGHTS = (SAFE_WEIGHTS_NAME, WEIGHTS_NAME, "adapter_model.safetensors", "adapter_model.bin")
WEIGHT_INDEXES = (SAFE_WEIGHTS_INDEX_NAME, "pytorch_model.bin.index.json")
START_OF_ARCHIVE, START_OF_PICKLE = b"PK\x03\x04", b"\x80"

# Files that no resume reads and that people edit, add or remove.
NOT_READ = re.compile(r"(.*/)?(.*\.md|\.git.*|training_args\.bin)|\.cache/.*")
# Nobody edits these with an editor, so that one with other bytes is damaged.
TENSORS = re.compile(r".*\.(safetensors|pt|pth|bin)")
WHOLE_MODEL = re.compile(r"(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")


class Findings(NamedTuple):
    """A sentence for each damaged file; and the files that were edited, with which the checkpoint is complete."""

    damage: list[str]
    edits: list[str]


# What was found in a folder, by the stamps its files had; verifying reads every byte, and a script that asks which
# checkpoint is the newest and then resumes from it asks twice.
_found: dict[Path, tuple[dict[str, Stamp], Manifest | None, Findings]] = {}


def damage_in(folder: Path) -> list[str]:
    """Return what is wrong with a checkpoint, one sentence for each damaged file; empty if it is intact.

    With a manifest, every file in it has to be there with its size and checksum. Files that somebody has edited, added,
    or replaced by others are no damage as long as the checkpoint is complete with them (`edits_in`). Without one, as
    transformers writes checkpoints, every file has to be complete as far as its format can tell.

    Parameters:
        folder: the checkpoint's folder.
    """
    return list(_inspected(Path(folder)).damage)


def edits_in(folder: Path) -> list[str]:
    """Return what was changed, added or removed since a checkpoint was written; empty if it has no manifest.

    Parameters:
        folder: the checkpoint's folder.
    """
    return list(_inspected(Path(folder)).edits)


def refuse_damage(folder: Path, advice: str) -> None:
    """Refuse a checkpoint that is damaged, and warn of one that was edited.

    Parameters:
        advice: the end of the error: what to do.

    Raises:
        ValueError: it is damaged.
    """
    damage, edits = _inspected(folder)
    if damage:
        raise ValueError(f"The checkpoint {folder} is damaged: {' '.join(damage)} {advice}")
    if edits:
        logger.warning("The checkpoint %s was edited (%s). It is complete, so it is used.", folder, ", ".join(edits))


def _inspected(folder: Path) -> Findings:
    if not folder.is_dir():
        return Findings([f"{folder} is no folder."], [])
    stamps = stamps_in(folder, with_links=True)
    try:
        manifest = read_manifest(folder)
    except DamagedManifest as error:
        return Findings([f"{error}."], [])
    key = folder.resolve()
    if key not in _found or _found[key][:2] != (stamps, manifest):
        present = set(stamps)
        if manifest is None:
            found = Findings(_damage_by_format(folder, present), [])
        else:
            found = _compare(folder, manifest, present)
        _found[key] = stamps, manifest, found
    return _found[key][2]


def _compare(folder: Path, manifest: Manifest, present: set[str]) -> Findings:
    damage: list[str] = []
    changed, gone = [], []
    for name, expected in manifest.files.items():
        if NOT_READ.fullmatch(name):
            continue
        if name not in present:
            if WHOLE_MODEL.fullmatch(name) and _holds_whole_model(folder, present):
                gone.append(name)
            else:
                damage.append(f"{name} is missing.")
        elif (read := file_record(folder / name)) != expected:
            if reason := _reason_against_an_edit(folder / name, read, expected):
                damage.append(f"{name} {reason}.")
            else:
                changed.append(name)
    added = sorted(name for name in present - manifest.files.keys() if not NOT_READ.fullmatch(name))
    # The state even if it is as it was written: in a copy it may not be the one of that folder.
    damage += _damage_by_grammar(folder, present.intersection((*added, TRAINER_STATE_NAME)))
    edits = {"changed": changed, "added": added, "gone": gone}
    return Findings([*dict.fromkeys(damage)], [f"{name} {how}" for how, names in edits.items() for name in names])


def _reason_against_an_edit(path: Path, read: FileRecord, expected: FileRecord) -> str | None:
    """Return what is wrong with a file that is not as it was written; None if it is a text that is whole."""
    if path.suffix == ".json":
        reason = (state_damage if path.name == TRAINER_STATE_NAME else json_damage)(path)
        return reason and f"is damaged: {reason}"
    holds_tensors = TENSORS.fullmatch(path.name) is not None
    if read.size < expected.size or (holds_tensors and read.size != expected.size):
        return f"has {read.size:,} bytes and was written with {expected.size:,}"
    try:
        if not holds_tensors:
            path.read_text("utf-8")
            return None
    except UnicodeDecodeError:
        pass
    return "is not as it was written (its checksum differs)"


def _holds_whole_model(folder: Path, present: set[str]) -> bool:
    if not present.isdisjoint((SAFE_WEIGHTS_NAME, WEIGHTS_NAME)):
        return True
    indexes = present.intersection(WEIGHT_INDEXES)
    return bool(indexes) and not any(_missing_shards(folder, index) for index in indexes)


def _damage_by_format(folder: Path, present: set[str]) -> list[str]:
    found = []
    indexes = [name for name in WEIGHT_INDEXES if name in present]
    has_weights = bool(indexes) or any(Path(name).name in WEIGHTS or _is_one_of(name, WEIGHT_PARTS) for name in present)
    if not has_weights:
        found.append("There are no weights (model.safetensors, an index of shards, or an adapter's).")
    if TRAINER_STATE_NAME not in present:
        found.append(f"{TRAINER_STATE_NAME} is missing.")
    # A checkpoint of the model only has none of them.
    missing = missing_from(present, STATES_OF_A_RESUME)
    if len(missing) < len(STATES_OF_A_RESUME):
        found.extend(f"{name} is missing." for name in missing)
    for index in indexes:
        found.extend(_missing_shards(folder, index))
    return [*found, *_damage_by_grammar(folder, present)]


def _damage_by_grammar(folder: Path, names: Iterable[str]) -> list[str]:
    return [
        f"{name} is damaged: {reason}."
        for name in sorted(names)
        for pattern, reason_of in FORMATS.items()
        if pattern.fullmatch(name) and (reason := reason_of(folder / name))
    ]


def _is_one_of(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


# What may exist instead of a file: parts of the optimizer's state, DeepSpeed's engine, which keeps a schedule
# that it steps by itself, and a file of random states for each of several processes.
IN_PLACE_OF = {
    OPTIMIZER_NAME: OPTIMIZER_PARTS,
    SCHEDULER_NAME: (ENGINE_PARTS,),
    RANDOM_STATE_NAME: ("rng_state_[0-9]*.pth",),
}


def missing_from(present: set[str], needed: Iterable[str]) -> list[str]:
    """Return the files that a resume needs and that neither are there nor have others in their place."""
    absent = [name for name in needed if name not in present]
    return [name for name in absent if not any(_is_one_of(other, IN_PLACE_OF.get(name, ())) for other in present)]


def _missing_shards(folder: Path, index: str) -> list[str]:
    try:
        shards = shards_of(folder / index)
    except ValueError as error:
        return [f"{index} {error}."]
    return [f"{shard}, a shard in {index}, is missing." for shard in shards if not (folder / shard).is_file()]


def json_damage(path: Path) -> str | None:
    """Return why a file is no JSON; None if it is."""
    try:
        json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        return f"it is no readable JSON ({error})"
    return None


def state_damage(path: Path) -> str | None:
    """Return why a trainer_state.json is not the one of its folder; None if it may be."""
    if reason := json_damage(path):
        return reason
    state = json.loads(path.read_text("utf-8"))
    if not isinstance(state, dict):
        return "it holds no object with fields"
    folder, step, epoch = path.parent.resolve(), state.get("global_step"), state.get("epoch")
    if isinstance(epoch, float) and not math.isfinite(epoch):
        return f"epoch is {epoch}"
    # A folder may have a name without a step.
    return f"global_step is {step} in {folder.name}" if checkpoint_step(folder) not in (None, step) else None


def safetensors_damage(path: Path) -> str | None:
    """Return why a safetensors file is incomplete, by its header; its format has no checksum of the numbers."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt"):
            return None
    except (OSError, SafetensorError) as error:
        return f"its header is not readable ({error})"


def archive_damage(path: Path) -> str | None:
    """Return why a file of torch.save is damaged, by the checksums in its archive; before torch 1.6 it has none."""
    with open(path, "rb") as file:
        start = file.read(len(START_OF_ARCHIVE))
    if start.startswith(START_OF_PICKLE):
        return None
    if start != START_OF_ARCHIVE:
        return "it does not begin as a file of torch.save does" if start else "it is empty"
    try:
        with zipfile.ZipFile(path) as archive:
            # All are 0 if a script has switched them off.
            has_sums = any(entry.CRC for entry in archive.infolist())
            member = archive.testzip() if has_sums else None
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError, EOFError) as error:
        return f"it is no readable archive of torch.save ({error})"
    return None if member is None else f"{member} in it has another checksum than was written"


FORMATS: dict[re.Pattern[str], Callable[[Path], str | None]] = {
    re.compile(r".*\.safetensors"): safetensors_damage,
    re.compile(r"(.*/)?(config|generation_config|adapter_config|.*\.index)\.json"): json_damage,
    re.compile(re.escape(TRAINER_STATE_NAME)): state_damage,
    re.compile(r"(optimizer|scheduler|scaler)\.(pt|bin)|rng_state(_\d+)?\.pth"): archive_damage,
    re.compile(r"(littrainer_.*|lightning_state)\.pt"): archive_damage,
    re.compile(r"(.*/)?(pytorch_model|adapter_model).*\.bin"): archive_damage,
}


def get_last_checkpoint(folder: str | Path, without: Collection[str] = ()) -> str | None:
    """Return the intact checkpoint with the highest step in a folder from which training can go on, or None.

    Skips newer ones that are damaged, with a warning that names the damaged files, and those with weights that are
    known not to be finite, with a warning that names them. If an address stands behind the folder, the newest complete
    checkpoint there is downloaded first.

    Parameters:
        folder: an output folder, which holds the `checkpoint-<step>` folders, or its address.
        without: names of checkpoints that do not count.

    Raises:
        FileNotFoundError: there is no such folder.
        RemoteFolderError: an object at the address could not be read.
    """
    folder = local_folder(os.fspath(folder))
    if address_of(folder) is not None:
        from littrainer.checkpoint.remote import fetch_newest

        without = {*without, *fetch_newest(folder, without)}
    return last_intact(folder, without)


def last_intact(folder: str | Path, without: Collection[str] = ()) -> str | None:
    """Do what `get_last_checkpoint` does with what is on this disk alone."""
    folders = (entry for entry in Path(folder).iterdir() if entry.is_dir() and entry.name not in without)
    steps = {step: entry.name for entry in folders if (step := checkpoint_step(entry)) is not None}
    found, damaged, sick = None, {}, []
    for step in sorted(steps, reverse=True):
        path = os.path.join(folder, steps[step])
        manifest = readable_manifest(Path(path))
        if manifest.is_thinned:
            continue
        if damage := damage_in(Path(path)):
            damaged[path] = damage
        elif manifest.weights_are_finite is False:
            sick.append(path)
        else:
            found = path
            break
    for path, damage in damaged.items():
        going_on = f"{found} is the newest intact one." if found else "There is no intact one before it."
        logger.warning("Passing over the damaged checkpoint %s: %s %s", path, " ".join(damage), going_on)
    if sick:
        going_on = f"{found} is the newest one before." if found else "There is no other one."
        logger.warning("Passing over %s: not all of their weights are finite numbers. %s", ", ".join(sick), going_on)
    return found
