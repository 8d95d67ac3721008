"""Verification of checkpoints: damage, edits, and the newest intact checkpoint."""

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

from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.checksums import (
    DamagedManifest,
    FileRecord,
    Manifest,
    Stamp,
    file_record,
    read_manifest,
    read_manifest_or_empty,
    stat_files,
)
from littrainer.checkpoint.layout import (
    ENGINE_SHARDS,
    OPTIMIZER_NAME,
    OPTIMIZER_SHARDS,
    RANDOM_STATE_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    WEIGHT_SHARDS,
    WEIGHTS_NAME,
    checkpoint_step,
    list_checkpoints,
    read_shard_names,
)

logger = logging.getLogger(__name__)

RESUME_STATES = (OPTIMIZER_NAME, SCHEDULER_NAME, RANDOM_STATE_NAME)
WEIGHTS = (SAFE_WEIGHTS_NAME, WEIGHTS_NAME, "adapter_model.safetensors", "adapter_model.bin")
WEIGHT_INDEXES = (SAFE_WEIGHTS_INDEX_NAME, "pytorch_model.bin.index.json")
ARCHIVE_MAGIC, PICKLE_MAGIC = b"PK\x03\x04", b"\x80"

NOT_READ = re.compile(r"(.*/)?(.*\.md|\.git.*|training_args\.bin)|\.cache/.*")
TENSORS = re.compile(r".*\.(safetensors|pt|pth|bin)")
FULL_MODEL_FILE = re.compile(r"(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")


class Inspection(NamedTuple):
    """A checkpoint's files (links included), manifest (empty if it has none), damage and edits."""

    folder: Path
    files: set[str]
    manifest: Manifest
    damage: list[str]
    edits: list[str]

    def refuse_damage(self, advice: str) -> None:
        """Raise a ValueError for a damaged checkpoint, and warn of edits."""
        if self.damage:
            raise ValueError(f"The checkpoint {self.folder} is damaged: {' '.join(self.damage)} {advice}")
        if self.edits:
            text = "The checkpoint %s was edited (%s). It is complete, so it is used."
            logger.warning(text, self.folder, ", ".join(self.edits))


# Cached, since verification reads every byte.
_edits_cache: dict[Path, tuple[dict[str, Stamp], Manifest | None, list[str]]] = {}


def find_damage(folder: Path) -> list[str]:
    """Return a sentence for each damaged file of a checkpoint; empty if it is intact.

    Text files that a user edited or added are no damage (`find_edits`). Without a manifest, as in checkpoints of
    transformers, files are checked by their formats.

    Parameters:
        folder: the checkpoint's folder.

    Examples:
        >>> from littrainer.checkpoint.verification import find_damage
        >>> find_damage(checkpoint)
        []
    """
    return inspect_checkpoint(Path(folder)).damage


def find_edits(folder: Path) -> list[str]:
    """Return files that were edited, added or removed since a checkpoint was written; empty without a manifest.

    Parameters:
        folder: the checkpoint's folder.
    """
    return inspect_checkpoint(Path(folder)).edits


def inspect_checkpoint(folder: Path) -> Inspection:
    none = Manifest({})
    if not folder.is_dir():
        return Inspection(folder, set(), none, [f"{folder} is no folder."], [])
    stamps: dict[str, Stamp] = {}
    try:
        stamps = stat_files(folder, with_links=True)
        manifest = read_manifest(folder)
    except (OSError, DamagedManifest) as error:
        return Inspection(folder, set(stamps), none, [f"{error}."], [])
    key, present = folder.resolve(), set(stamps)
    if key in _edits_cache and _edits_cache[key][:2] == (stamps, manifest):
        return Inspection(folder, present, manifest or none, [], list(_edits_cache[key][2]))
    if manifest is None:
        damage, edits = _inspect_without_manifest(folder, present), list[str]()
    else:
        damage, edits = _compare(folder, manifest, present)
    # Damage is not cached, since a read error may be temporary.
    if not damage:
        _edits_cache[key] = stamps, manifest, list(edits)
    return Inspection(folder, present, manifest or none, damage, edits)


def _compare(folder: Path, manifest: Manifest, present: set[str]) -> tuple[list[str], list[str]]:
    damage, edits = [], list[str]()
    for name, expected in manifest.files.items():
        if NOT_READ.fullmatch(name):
            continue
        if name in present:
            reason = _compare_file(folder / name, expected)
            damage += [f"{name} {reason}."] if reason else []
            edits += [f"{name} changed"] if reason == "" else []
        elif FULL_MODEL_FILE.fullmatch(name) and _has_full_model(folder, present):
            edits.append(f"{name} gone")
        else:
            damage.append(f"{name} is missing.")
    added = sorted(name for name in present - manifest.files.keys() if not NOT_READ.fullmatch(name))
    # The state file is always checked, since the name of a copied folder may have another step than the file.
    damage += _find_damage_by_format(folder, present.intersection((*added, TRAINER_STATE_NAME)))
    return [*dict.fromkeys(damage)], [*edits, *(f"{name} added" for name in added)]


def _compare_file(path: Path, expected: FileRecord) -> str | None:
    """Return the damage of a changed file, "" for an edited text, and None for an unchanged file."""
    try:
        if (record := file_record(path)) == expected:
            return None
        if path.suffix == ".json":
            reason = (find_state_damage if path.name == TRAINER_STATE_NAME else find_json_damage)(path)
            return f"is damaged: {reason}" if reason else ""
        holds_tensors = TENSORS.fullmatch(path.name) is not None
        if record.size < expected.size or (holds_tensors and record.size != expected.size):
            return f"has {record.size:,} bytes and was written with {expected.size:,}"
        if not holds_tensors:
            path.read_text("utf-8")
            return ""
    except OSError as error:
        return f"cannot be read ({error})"
    except UnicodeDecodeError:
        pass
    return "is not as it was written (its checksum differs)"


def _has_full_model(folder: Path, present: set[str]) -> bool:
    indexes = present.intersection(WEIGHT_INDEXES)
    has_shards = bool(indexes) and not any(_find_missing_shards(folder, index) for index in indexes)
    return has_shards or not present.isdisjoint((SAFE_WEIGHTS_NAME, WEIGHTS_NAME))


def _inspect_without_manifest(folder: Path, present: set[str]) -> list[str]:
    damage = []
    indexes = [name for name in WEIGHT_INDEXES if name in present]
    if not indexes and not any(Path(name).name in WEIGHTS or _matches(name, WEIGHT_SHARDS) for name in present):
        damage.append("There are no weights (model.safetensors, an index of shards, or adapter files).")
    missing = find_missing(present, RESUME_STATES)
    missing = [] if len(missing) == len(RESUME_STATES) else missing
    damage += [f"{name} is missing." for name in [*find_missing(present, [TRAINER_STATE_NAME]), *missing]]
    damage += [sentence for index in indexes for sentence in _find_missing_shards(folder, index)]
    return [*damage, *_find_damage_by_format(folder, present)]


def _find_damage_by_format(folder: Path, names: Iterable[str]) -> list[str]:
    return [
        f"{name} is damaged: {reason}."
        for name in sorted(names)
        for pattern, reason_of in FORMATS.items()
        if pattern.fullmatch(name) and (reason := reason_of(folder / name))
    ]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


ALTERNATIVE_FILES = {
    OPTIMIZER_NAME: OPTIMIZER_SHARDS,
    SCHEDULER_NAME: (ENGINE_SHARDS,),
    RANDOM_STATE_NAME: ("rng_state_[0-9]*.pth",),
}


def find_missing(present: set[str], needed: Iterable[str]) -> list[str]:
    absent = [name for name in needed if name not in present]
    return [name for name in absent if not any(_matches(other, ALTERNATIVE_FILES.get(name, ())) for other in present)]


def _find_missing_shards(folder: Path, index: str) -> list[str]:
    try:
        shards = read_shard_names(folder / index)
    except ValueError as error:
        return [f"{index} {error}."]
    return [f"{shard}, a shard in {index}, is missing." for shard in shards if not (folder / shard).is_file()]


def find_json_damage(path: Path) -> str | None:
    try:
        json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"it is no readable JSON ({error})"
    return None


def find_state_damage(path: Path) -> str | None:
    """Return why a trainer_state.json is damaged or belongs to another checkpoint; None if neither."""
    try:
        state = TrainerState.load_from_json(str(path))
    except (OSError, ValueError, RecursionError) as error:
        return f"it is no readable state ({error.__cause__ or error})"
    folder, step, epoch = path.parent.resolve(), state.global_step, state.epoch
    # Several callbacks of a class share an entry, which is a list of their states.
    entries = [state.log_history, *state.stateful_callbacks.values()]
    if [e for part in entries for e in (part if isinstance(part, list) else [part]) if not isinstance(e, dict)]:
        return "log_history or stateful_callbacks has an entry that is no dict"
    if not math.isfinite(epoch):
        return f"epoch is {epoch}"
    return f"global_step is {step} in {folder.name}" if checkpoint_step(folder) not in (None, step) else None


def find_safetensors_damage(path: Path) -> str | None:
    """Return why a safetensors file, which has no checksum, is incomplete."""
    from safetensors import SafetensorError, safe_open

    try:
        # Reading raises an error at a bad sector, where safe_open's mapping would end the process.
        file_record(path)
        with safe_open(path, "pt"):
            return None
    except OSError as error:
        return f"it cannot be read ({error})"
    except SafetensorError as error:
        return f"its header is not readable ({error})"


def find_archive_damage(path: Path) -> str | None:
    """Return why an archive of torch.save is damaged; pickles of earlier releases are not checked."""
    try:
        with open(path, "rb") as file:
            start = file.read(len(ARCHIVE_MAGIC))
        if start.startswith(PICKLE_MAGIC):
            return None
        if start != ARCHIVE_MAGIC:
            return "it does not begin as a file of torch.save does" if start else "it is empty"
        with zipfile.ZipFile(path) as archive:
            # All checksums are 0 if the writer called `torch.serialization.set_crc32_options(False)`.
            has_checksums = any(entry.CRC for entry in archive.infolist())
            member = archive.testzip() if has_checksums else None
    # A damaged archive raises many kinds of errors.
    except Exception as error:
        return f"it is no readable archive of torch.save ({error})"
    return None if member is None else f"{member} in it has another checksum than was written"


FORMATS: dict[re.Pattern[str], Callable[[Path], str | None]] = {
    re.compile(r".*\.safetensors"): find_safetensors_damage,
    re.compile(r"(.*/)?(config|generation_config|adapter_config|.*\.index)\.json"): find_json_damage,
    re.compile(re.escape(TRAINER_STATE_NAME)): find_state_damage,
    re.compile(r"(optimizer|scheduler|scaler)\.(pt|bin)|rng_state(_\d+)?\.pth"): find_archive_damage,
    re.compile(r"(littrainer_.*|lightning_state)\.pt"): find_archive_damage,
    re.compile(r"(.*/)?(pytorch_model|adapter_model).*\.bin"): find_archive_damage,
}


def find_last_intact(folder: str | Path, without: Collection[str] = ()) -> str | None:
    newest, damaged, nonfinite = None, {}, []
    for name in [path.name for path in list_checkpoints(folder) if path.name not in without]:
        path = os.path.join(folder, name)
        manifest = read_manifest_or_empty(Path(path))
        if manifest.is_thinned:
            continue
        if damage := find_damage(Path(path)):
            damaged[path] = " ".join(damage)
        elif manifest.weights_are_finite is False:
            nonfinite.append(path)
        else:
            newest = path
            break
    consequence = f"{newest} is the newest intact one." if newest else "There is no intact one before it."
    for path, damage_text in damaged.items():
        logger.warning("Skipping the damaged checkpoint %s: %s %s", path, damage_text, consequence)
    if nonfinite:
        consequence = f"{newest} is the newest finite one." if newest else "There is no intact finite one."
        names = ", ".join(nonfinite)
        logger.warning("Skipping %s: weights or optimizer states are not finite. %s", names, consequence)
    return newest
