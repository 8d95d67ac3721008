"""Weights and optimizer states as transformers writes them in checkpoints of FSDP, in one file or in parts.

In one file the optimizer's state has names of parameters; in parts, a folder of `torch.distributed.checkpoint` holds
the shards of each process. Damage, code and paths outside of the folder are a ValueError.
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

# Names of the states in the folders.
WEIGHTS_KEY, OPTIMIZER_KEY = "model", "optimizer"
STATE_PREFIX, GROUPS_PREFIX = f"{OPTIMIZER_KEY}.state.", f"{OPTIMIZER_KEY}.param_groups."


def read_fsdp_weights(folder: Path) -> dict[str, Any]:
    """Return the weights of a checkpoint, whole."""
    if (folder / FSDP_WEIGHTS_NAME).is_file():
        return load_tensors(folder / FSDP_WEIGHTS_NAME)
    whole = load_full_state(folder / WEIGHTS_FOLDER)
    return {name.removeprefix(f"{WEIGHTS_KEY}."): value for name, value in whole.items()}


def nest_optimizer_state(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with names of parameters, from what a folder holds by name."""
    groups: dict[int, dict[str, Any]] = {}
    state: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        if name.startswith(GROUPS_PREFIX):
            number, _, entry = name.removeprefix(GROUPS_PREFIX).partition(".")
            groups.setdefault(int(number), {})[entry] = value
        elif name.startswith(STATE_PREFIX):
            # Names of parameters have dots, those of entries do not.
            parameter, _, entry = name.removeprefix(STATE_PREFIX).rpartition(".")
            state.setdefault(parameter, {})[entry] = value
    return {"state": state, "param_groups": [groups[number] for number in sorted(groups)]}


def read_weight_metadata(folder: Path) -> dict[str, TensorStorageMetadata | None]:
    """Return what a folder of weights holds by the model's names, as `read_tensor_metadata` returns it."""
    return {name.removeprefix(f"{WEIGHTS_KEY}."): entry for name, entry in read_tensor_metadata(folder).items()}


def load_optimizer_shards(folder: Path, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Read this process's part of an optimizer's state, sharded as its parameters are, with their names."""
    wanted: dict[str, Any] = {}
    for name, entry in read_tensor_metadata(folder).items():
        if entry is None:
            wanted[name] = None
            continue
        parameter = parameters.get(name.removeprefix(STATE_PREFIX).rpartition(".")[0])
        is_spread = parameter is not None and parameter.dim() > 0 and parameter.shape == entry.size
        wanted[name] = (
            torch.empty_like(parameter, dtype=entry.properties.dtype)  # type: ignore[arg-type]
            if is_spread
            else torch.empty(entry.size, dtype=entry.properties.dtype)
        )
    load_into(folder, wanted)
    return nest_optimizer_state(wanted)


# Parts of an index: module -> names in it.
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
    """Write each process's part of a state; if one could not be written, all raise an OSError.

    Parameters:
        group: the process group in which they agree; by default that of the training.
    """
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
    """Return what a folder holds by name: of tensors their shape and number format, None for anything else."""
    entries = _Reader(folder).read_metadata().state_dict_metadata
    return {name: entry if isinstance(entry, TensorStorageMetadata) else None for name, entry in entries.items()}


def load_full_state(folder: Path) -> dict[str, Any]:
    """Return what a folder holds by name, whole, in this process alone."""
    wanted = {
        name: None if entry is None else torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in read_tensor_metadata(folder).items()
    }
    load_into(folder, wanted)
    return wanted


def load_into(folder: Path, wanted: dict[str, Any]) -> None:
    """Read into tensors by name, each process what it has of those that are spread; other values are put in place."""
    try:
        with warnings.catch_warnings():
            # No process group is used on purpose.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            distributed_checkpoint.load(wanted, storage_reader=_Reader(folder), planner=_Planner(), no_dist=True)
    except CheckpointException as failure:
        error = next(error for error, _ in failure.failures.values())
        if isinstance(error, _Refused):
            raise ValueError(str(error)) from error
        raise ValueError(
            f"{folder} is damaged: {str(error).strip() or type(error).__name__}. {OTHER_CHECKPOINT}"
        ) from error


class _Refused(ValueError):
    """A file that names what could run code, or lies outside of its folder."""


class _Index(pickle.Unpickler):
    """Reads an index, which torch writes by pickle, and makes nothing but its parts."""

    def __init__(self, content: bytes, path: Path):
        super().__init__(io.BytesIO(content))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        is_format = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_format and name not in INDEX_CLASSES.get(module, ()):
            raise _Refused(
                f"{self._path} is refused: it names {module}.{name}, which is no part of an index and {COULD_RUN_CODE}"
            )
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    def __init__(self, folder: Path):
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._folder / SHARD_INDEX_NAME
        try:
            metadata = _Index(path.read_bytes(), path).load()
        except (_Refused, OSError):
            raise
        except Exception as error:
            raise ValueError(f"{path} is damaged: {error or type(error).__name__}. {OTHER_CHECKPOINT}") from error
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{path} is no index of a sharded checkpoint. {OTHER_CHECKPOINT}")
        for place in (metadata.storage_data or {}).values():
            resolve_inside(self._folder, str(place.relative_path), path)
        return metadata


class _Planner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        try:
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
        except Exception as error:
            forbidden = FORBIDDEN_GLOBAL.search(str(error))
            if forbidden is None:
                raise
            raise _Refused(
                f"The sharded checkpoint is refused: {read_item.dest_index.fqn} names {forbidden.group(1)}, which "
                f"{COULD_RUN_CODE}"
            ) from error
