"""Whether a checkpoint is intact: what damage there is to its files, each named."""

from __future__ import annotations

import json
import math
import re
import struct
import zipfile
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from littrainer.checkpoint.manifest import (
    MANIFEST_NAME,
    DamagedManifest,
    Manifest,
    file_record,
    files_in,
    leaves_folder,
    read_manifest,
)
from littrainer.checkpoint.names import (
    ENGINE_PARTS,
    OPTIMIZER_NAME,
    OPTIMIZER_PARTS,
    PREFIX_CHECKPOINT_DIR,
    RANDOM_STATE_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    WEIGHT_PARTS,
    WEIGHTS_NAME,
)
from littrainer.checkpoint.sealing import Stamp, stamp_of

STATES_OF_A_RESUME = (OPTIMIZER_NAME, SCHEDULER_NAME, RANDOM_STATE_NAME)
WEIGHTS = (SAFE_WEIGHTS_NAME, WEIGHTS_NAME, "adapter_model.safetensors", "adapter_model.bin")
WEIGHT_INDEXES = (SAFE_WEIGHTS_INDEX_NAME, "pytorch_model.bin.index.json")
START_OF_ARCHIVE, START_OF_PICKLE = b"PK\x03\x04", b"\x80"

# Files that no resume reads and that people edit or remove.
NOT_READ = re.compile(r"(.*/)?(README\.md|.*\.md|\.git.*|training_args\.bin)")

# What was found in a folder, by the stamps its files had; verifying reads every byte, and a script that asks which
# checkpoint is the newest and then resumes from it asks twice.
_found: dict[Path, tuple[dict[str, Stamp], tuple[str, ...], list[str]]] = {}


def damage_in(folder: Path, needed: Iterable[str] = ()) -> list[str]:
    """What is wrong with a checkpoint, one sentence for each damaged file; empty where it is intact.

    With a manifest, every file in it has to have its size and checksum, except documents that no resume reads. Without
    one, as transformers writes checkpoints, every file has to be complete as far as its own format can tell.

    Parameters:
        folder: the checkpoint's folder.
        needed: files that have to be there, whatever the manifest says.
    """
    folder, needed = Path(folder), tuple(needed)
    if not folder.is_dir():
        return [f"{folder} is no folder."]
    names = [*files_in(folder, with_links=True), MANIFEST_NAME]
    stamps = {name: stamp_of(folder / name) for name in names if (folder / name).exists()}
    key = folder.resolve()
    if key in _found and _found[key][:2] == (stamps, needed):
        return list(_found[key][2])
    damage = _find_damage(folder, set(stamps), needed)
    _found[key] = stamps, needed, damage
    return list(damage)


def _find_damage(folder: Path, present: set[str], needed: tuple[str, ...]) -> list[str]:
    damage = [f"{name} is missing." for name in needed if not (folder / name).is_file()]
    try:
        manifest = read_manifest(folder)
    except DamagedManifest as error:
        return [*damage, f"{error}."]
    found = damage_by_format(folder, present) if manifest is None else _differences(folder, manifest)
    return [*damage, *(sentence for sentence in found if sentence not in damage)]


def _differences(folder: Path, manifest: Manifest) -> list[str]:
    differences = []
    for name, expected in manifest.files.items():
        if NOT_READ.fullmatch(name):
            continue
        path = folder / name
        if not path.is_file():
            differences.append(f"{name} is missing.")
        elif (size := path.stat().st_size) != expected.size:
            differences.append(f"{name} has {size:,} bytes and was written with {expected.size:,}.")
        elif (read := _record_or_error(path)) != expected:
            reason = read if isinstance(read, str) else "its checksum differs"
            differences.append(f"{name} is not as it was written ({reason}).")
    return differences


def _record_or_error(path: Path) -> Any:
    try:
        return file_record(path)
    except OSError as error:
        return str(error)


def damage_by_format(folder: Path, present: Collection[str] | None = None) -> list[str]:
    """What is wrong with a checkpoint as far as the formats of its files can tell, whatever a manifest says.

    Parameters:
        present: its files, relative to it; by default those that are there.
    """
    present = set(files_in(folder, with_links=True) if present is None else present)
    found = []
    indexes = [name for name in WEIGHT_INDEXES if name in present]
    has_weights = bool(indexes) or any(Path(name).name in WEIGHTS or _is_one_of(name, WEIGHT_PARTS) for name in present)
    if not has_weights:
        found.append("There are no weights (model.safetensors, an index of shards, or an adapter's).")
    if TRAINER_STATE_NAME not in present:
        found.append(f"{TRAINER_STATE_NAME} is missing.")
    # A checkpoint of the model only has none of them.
    missing = [name for name in STATES_OF_A_RESUME if name not in present and not _per_process(name, present)]
    if len(missing) < len(STATES_OF_A_RESUME):
        found.extend(f"{name} is missing." for name in missing)
    for index in indexes:
        found.extend(_missing_shards(folder, index))
    for name in sorted(present):
        for pattern, reason_of in FORMATS.items():
            if pattern.fullmatch(name) and (reason := reason_of(folder / name)):
                found.append(f"{name} is damaged: {reason}.")
    return found


def _is_one_of(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _per_process(name: str, present: set[str]) -> bool:
    if name == OPTIMIZER_NAME and any(_is_one_of(other, OPTIMIZER_PARTS) for other in present):
        return True
    if name == SCHEDULER_NAME and any(_is_one_of(other, (ENGINE_PARTS,)) for other in present):
        return True
    stem, suffix = Path(name).stem, Path(name).suffix
    return any(re.fullmatch(rf"{stem}_\d+{re.escape(suffix)}", other) for other in present)


def _missing_shards(folder: Path, index: str) -> list[str]:
    try:
        shards = set(json.loads((folder / index).read_text("utf-8"))["weight_map"].values())
        if not all(isinstance(shard, str) for shard in shards):
            raise TypeError("its weight_map names other things than files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{index} is no readable index of shards ({error})."]
    found = [
        f"{index} names {shard!r}, which is outside of the checkpoint." for shard in shards if leaves_folder(shard)
    ]
    return found or [
        f"{shard}, a shard in {index}, is missing." for shard in sorted(shards) if not (folder / shard).is_file()
    ]


def json_damage(path: Path) -> str | None:
    """Why a file is no JSON; None where it is."""
    try:
        json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        return f"it is no readable JSON ({error})"
    return None


def state_damage(path: Path) -> str | None:
    """Why a trainer state is none of the checkpoint that it lies in; None where it is."""
    damage = json_damage(path)
    if damage is not None:
        return damage
    state = json.loads(path.read_text("utf-8"))
    if not isinstance(state, dict):
        return "it is no trainer state"
    epoch, step = state.get("epoch"), state.get("global_step")
    if epoch is not None and not (isinstance(epoch, (int, float)) and math.isfinite(epoch)):
        return f"its epoch is {epoch!r}"
    in_name = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.absolute().parent.name)
    if in_name is not None and "global_step" in state and step != int(in_name[1]):
        return f"its global_step is {step!r}"
    return None


def safetensors_damage(path: Path) -> str | None:
    """Why a safetensors file is incomplete, by its header; its format has no checksum, so changed numbers go unseen."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                return f"its header is cut off ({size:,} bytes)"
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its header is not readable ({error})"
    expected = 8 + length + max(ends, default=0)
    return None if size == expected else f"it has {size:,} bytes and its header says {expected:,}"


def archive_damage(path: Path) -> str | None:
    """Why a file of torch.save is damaged, by the checksums in its archive; its format before torch 1.6 has none."""
    with open(path, "rb") as file:
        start = file.read(len(START_OF_ARCHIVE))
    if not start:
        return "it is empty"
    if start.startswith(START_OF_PICKLE):
        return None
    if start != START_OF_ARCHIVE:
        return "it does not begin as a file of torch.save does"
    try:
        with zipfile.ZipFile(path) as archive:
            # Where all are 0, as in an optimizer.pt of ours, there are none.
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
