"""Weights and optimizer states in transformers' FSDP checkpoints, full or in shards of `torch.distributed.checkpoint`.

Damage, code and paths outside of the folder raise a ValueError.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from littrainer.checkpoint.layout import FSDP_WEIGHTS_NAME, SHARD_INDEX_NAME, WEIGHTS_FOLDER
from littrainer.checkpoint.safe_loading import (
    COULD_RUN_CODE,
    FORBIDDEN_GLOBAL,
    OTHER_CHECKPOINT,
    load_tensors,
    resolve_inside,
)

WEIGHTS_KEY, OPTIMIZER_KEY = "model", "optimizer"
STATE_PREFIX, GROUPS_PREFIX = f"{OPTIMIZER_KEY}.state.", f"{OPTIMIZER_KEY}.param_groups."


def read_fsdp_weights(folder: Path) -> dict[str, Any]:
    if (folder / FSDP_WEIGHTS_NAME).is_file():
        return load_tensors(folder / FSDP_WEIGHTS_NAME)
    state = load_full_state(folder / WEIGHTS_FOLDER)
    return {name.removeprefix(f"{WEIGHTS_KEY}."): value for name, value in state.items()}


def nest_optimizer_state(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nest flat entries by parameter name."""
    groups: dict[int, dict[str, Any]] = {}
    state: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        if name.startswith(GROUPS_PREFIX):
            number, _, entry = name.removeprefix(GROUPS_PREFIX).partition(".")
            groups.setdefault(int(number), {})[entry] = value
        elif name.startswith(STATE_PREFIX):
            # Only parameter names contain dots.
            parameter, _, entry = name.removeprefix(STATE_PREFIX).rpartition(".")
            state.setdefault(parameter, {})[entry] = value
    return {"state": state, "param_groups": [groups[number] for number in sorted(groups)]}


def load_optimizer_shards(folder: Path, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Load this process's shards, by parameter name."""
    state: dict[str, Any] = {}
    for name, entry in read_tensor_metadata(folder).items():
        if entry is None:
            state[name] = None
            continue
        parameter = parameters.get(name.removeprefix(STATE_PREFIX).rpartition(".")[0])
        is_sharded = parameter is not None and parameter.dim() > 0 and parameter.shape == entry.size
        state[name] = (
            torch.empty_like(parameter, dtype=entry.properties.dtype)  # type: ignore[arg-type]
            if is_sharded
            else torch.empty(entry.size, dtype=entry.properties.dtype)
        )
    load_into(folder, state)
    return nest_optimizer_state(state)


# Allowed names in an index, by module.
PATHS = frozenset(("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath"))
INDEX_CLASSES: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
            *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
    "torch.distributed.checkpoint.filesystem": frozenset(("_StorageInfo", "_StoragePrefix")),
    "torch.serialization": frozenset(("_get_layout",)),
    "torch": frozenset(("Size",)),
    "pathlib": PATHS,
    "pathlib._local": PATHS,
}


def write_shards(folder: Path, state: dict[str, Any], group: Any = None) -> None:
    """Write each process's shards of a state; if a process fails, all raise an OSError."""
    try:
        distributed_checkpoint.save(
            state, storage_writer=FileSystemWriter(folder), planner=DefaultSavePlanner(), process_group=group
        )
    except CheckpointException as failure:
        rank, error = next((rank, error) for rank, (error, _) in failure.failures.items())
        kind = type(error) if isinstance(error, OSError) else OSError
        raise kind(
            getattr(error, "errno", None), f"{folder} could not be written in process {rank}: {error}"
        ) from error


def read_tensor_metadata(folder: Path) -> dict[str, TensorStorageMetadata | None]:
    """Return the metadata by entry; None if it is no tensor."""
    entries = _SafeReader(folder).read_metadata().state_dict_metadata
    return {name: entry if isinstance(entry, TensorStorageMetadata) else None for name, entry in entries.items()}


def load_full_state(folder: Path) -> dict[str, Any]:
    """Load full entries in this process alone."""
    state = {
        name: None if entry is None else torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in read_tensor_metadata(folder).items()
    }
    load_into(folder, state)
    return state


def load_into(folder: Path, state: dict[str, Any]) -> None:
    """Load entries into the tensors of a dict, each process its shards; other values are replaced."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            distributed_checkpoint.load(
                state, storage_reader=_SafeReader(folder), planner=_SafeLoadPlanner(), no_dist=True
            )
    except CheckpointException as failure:
        error = next(error for error, _ in failure.failures.values())
        if isinstance(error, _UnsafeFileError):
            raise ValueError(str(error)) from error
        raise ValueError(
            f"{folder} is damaged: {str(error).strip() or type(error).__name__}. {OTHER_CHECKPOINT}"
        ) from error


class _UnsafeFileError(ValueError):
    pass


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler that allows only `INDEX_CLASSES` and dtypes."""

    def __init__(self, content: bytes, path: Path):
        super().__init__(io.BytesIO(content))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        is_format = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_format and name not in INDEX_CLASSES.get(module, ()):
            raise _UnsafeFileError(
                f"{self._path} is refused: it names {module}.{name}, which is no part of an index and {COULD_RUN_CODE}"
            )
        return super().find_class(module, name)


class _SafeReader(FileSystemReader):
    def __init__(self, folder: Path):
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._folder / SHARD_INDEX_NAME
        try:
            metadata = _IndexUnpickler(path.read_bytes(), path).load()
        except (_UnsafeFileError, OSError):
            raise
        except Exception as error:
            raise ValueError(f"{path} is damaged: {error or type(error).__name__}. {OTHER_CHECKPOINT}") from error
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{path} is no index of a sharded checkpoint. {OTHER_CHECKPOINT}")
        for storage in (metadata.storage_data or {}).values():
            resolve_inside(self._folder, str(storage.relative_path), path)
        return metadata


class _SafeLoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        try:
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
        except Exception as error:
            forbidden = FORBIDDEN_GLOBAL.search(str(error))
            if forbidden is None:
                raise
            raise _UnsafeFileError(
                f"The sharded checkpoint is refused: {read_item.dest_index.fqn} names {forbidden.group(1)}, which "
                f"{COULD_RUN_CODE}"
            ) from error
