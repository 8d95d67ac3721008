"""Writing and loading of any model's weights in transformers' files."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import filterfalse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from littrainer.checkpoint.layout import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
    checkpoint_step,
    has_fsdp_weights,
    read_shard_names,
)
from littrainer.checkpoint.safe_loading import (
    OTHER_CHECKPOINT,
    load_safetensors,
    load_tensors,
    refuse_unsafe,
    resolve_inside,
)
from littrainer.model.facts import unwrap_user_model
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.runtime.notes import listed

logger = logging.getLogger(__name__)

WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
# Non-tensor states of modules (`get_extra_state`).
EXTRA_STATE_NAME = "littrainer_extra_state.pt"
EXTRA_STATE_SUFFIX = "_extra_state"
MAX_SHARD_SIZE: int | str = 50 * 10**9
COMPILED_PART = "_orig_mod"
WRAPPER_PREFIX = "module."
MAX_LISTED_NAMES = 8


# ---- Writing ---------------------------------------------------------------------------------------------------------


def write_weights(
    model: nn.Module,
    output_dir: str | Path,
    state_dict: Mapping[str, Any] | None = None,
    max_shard_size: int | str | None = None,
) -> None:
    """Write a model's weights, or only its adapters, and its configuration.

    Raises:
        ValueError: a weight has no values (device meta), or an extra state could not be loaded safely.
    """
    os.makedirs(output_dir, exist_ok=True)
    inner: Any = unwrap_user_model(model)
    if not is_a(inner, "pretrained model"):
        _write_plain(model, Path(output_dir), state_dict, max_shard_size or MAX_SHARD_SIZE)
        return
    if state_dict is not None and inner is not model:
        state_dict = {_strip_wrapper_prefixes(name): tensor for name, tensor in state_dict.items()}
    keywords: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    with _hide_progress_bar():
        inner.save_pretrained(output_dir, state_dict=state_dict, **keywords)
    if has_adapters(inner):
        write_non_adapter_params(inner, Path(output_dir), state_dict)


@contextlib.contextmanager
def _hide_progress_bar() -> Iterator[None]:
    set_hook: Any = getattr(sys.modules.get("transformers.utils.logging"), "set_tqdm_hook", lambda hook: None)
    earlier = set_hook(_make_hidden_bar)
    try:
        yield
    finally:
        # If a concurrent save had hidden the bar already, it restores the hook itself.
        if earlier is not _make_hidden_bar:
            set_hook(earlier)


def _make_hidden_bar(factory: Any, args: Any, keywords: Any) -> Any:
    return sys.modules["transformers.utils.logging"].EmptyTqdm(*args, **keywords)


def can_write_copied_weights(model: Any) -> bool:
    """Return whether this model can be written from a copy of its state dict.

    Adapters, quantized weights and an overridden `save_pretrained` read the model itself; FSDP's state dict would free
    weights that are gathered for a forward pass.
    """
    inner = unwrap_user_model(model)
    if has_adapters(inner) or getattr(inner, "hf_quantizer", None) is not None or is_a(model, "resharding module"):
        return False
    save_pretrained = getattr(type(inner), "save_pretrained", None)
    return save_pretrained is None or (save_pretrained.__module__ or "").partition(".")[0] == "transformers"


def _write_plain(
    model: nn.Module, folder: Path, state_dict: Mapping[str, Any] | None, max_shard_size: int | str
) -> None:
    import safetensors.torch

    model_state = model.state_dict()
    state = model_state if state_dict is None else state_dict
    tensors = {name: value.detach() for name, value in state.items() if isinstance(value, torch.Tensor)}
    if without_values := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(
            f"The model's weights cannot be written to {folder}: {listed(without_values, MAX_LISTED_NAMES)} have no "
            "values (device meta). Give them values, for instance with to_empty() and an initialisation, before saving."
        )
    extras_path = folder / EXTRA_STATE_NAME
    extras_path.unlink(missing_ok=True)
    if extras := {name: value for name, value in state.items() if name not in tensors}:
        torch.save(extras, extras_path)
        refuse_unsafe(extras_path, "Let get_extra_state return tensors, numbers, text and containers of them.")
    for first, duplicates in find_tied_names(model_state).items():
        for name in duplicates:
            if first in tensors and name in tensors and torch.equal(tensors[first], tensors[name]):
                del tensors[name]
    # Clone views of shared memory.
    written = set()
    for name, tensor in tensors.items():
        if tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in written:
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
        written.add(tensor.data_ptr())
    fits = isinstance(max_shard_size, int) and sum(tensor.nbytes for tensor in tensors.values()) <= max_shard_size
    if fits and not (folder / SAFE_WEIGHTS_INDEX_NAME).exists():
        # Fast path without huggingface_hub's search for shared tensors.
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(contiguous, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    else:
        from huggingface_hub import save_torch_state_dict

        save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size)


def find_tied_names(state_dict: Mapping[str, Any]) -> dict[str, list[str]]:
    names: dict[Any, list[str]] = {}
    for name, value in state_dict.items():
        # The shard of a DTensor.
        tensor = getattr(value, "_local_tensor", value)
        if isinstance(tensor, torch.Tensor) and not (is_lazy(tensor) or tensor.is_meta) and tensor.numel():
            key = tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
            names.setdefault(key, []).append(name)
    return {first: duplicates for first, *duplicates in names.values() if duplicates}


# ---- Reading ---------------------------------------------------------------------------------------------------------


def read_weights(folder: Path) -> dict[str, Any]:
    path = next(filter(Path.is_file, map(folder.joinpath, READERS)), None)
    if path is not None:
        state = READERS[path.name](path)
    elif has_fsdp_weights(folder):
        from littrainer.checkpoint.sharded_files import read_fsdp_weights

        state = read_fsdp_weights(folder)
    else:
        raise ValueError(
            f"No model weights in {folder}: expected {', '.join(READERS)}. Give a checkpoint's folder, or one that "
            "save_pretrained wrote."
        )
    extras = folder / EXTRA_STATE_NAME
    return {**state, **load_tensors(extras)} if extras.is_file() else state


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights or adapters."""
    has_file = any((folder / name).is_file() for name in READERS)
    return has_file or has_fsdp_weights(folder) or bool(list_adapters(folder))


def _read_shards(index: Path) -> dict[str, Any]:
    try:
        shards = read_shard_names(index)
    except ValueError as error:
        raise ValueError(f"{index} {error}. {OTHER_CHECKPOINT}") from error
    load = load_safetensors if index.name == SAFE_WEIGHTS_INDEX_NAME else load_tensors
    paths = [resolve_inside(index.parent, shard, index) for shard in shards]
    return {name: tensor for path in paths for name, tensor in load(path).items()}


# The first existing file is read.
READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    SAFE_WEIGHTS_NAME: load_safetensors,
    WEIGHTS_NAME: load_tensors,
    SAFE_WEIGHTS_INDEX_NAME: _read_shards,
    WEIGHTS_INDEX_NAME: _read_shards,
}


@dataclass(frozen=True)
class Differences:
    """Differences between stored weights and a model's.

    Parameters:
        missing: names that the file lacks.
        unexpected: names that the model lacks.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)

    @classmethod
    def between(cls, stored: Mapping[str, Any], state: Mapping[str, Any]) -> Differences:
        # Parameters of lazy modules have no shape yet.
        shapes = [
            describe_shape_mismatch(name, stored[name].shape, value.shape)
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and not is_lazy(value) and isinstance(stored.get(name), torch.Tensor)
            if stored[name].shape != value.shape and not name.endswith(EXTRA_STATE_SUFFIX)
        ]
        missing, unexpected = filterfalse(stored.__contains__, state), filterfalse(state.__contains__, stored)
        return cls([*missing], [*unexpected], shapes)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes)

    def __str__(self) -> str:
        parts = {
            "the checkpoint has no weights for": self.missing,
            "the model does not have": self.unexpected,
            "shapes differ:": self.shapes,
        }
        return "; ".join(f"{text} {listed(names, MAX_LISTED_NAMES)}" for text, names in parts.items() if names)


def load_weights(
    model: nn.Module, folder: Path, *, to_resume: bool = False, on_key_mismatch: Callable[[Any], None] | None = None
) -> None:
    """Load the weights of a checkpoint into a model by its `load_state_dict`.

    Parameters:
        to_resume: refuse all differences that would change a training, not only different shapes.
        on_key_mismatch: replaces `log_key_mismatch`; not called for adapters.
    """
    inner = unwrap_user_model(model)
    materialize_expanded_tensors(inner)
    has_full_weights = (folder / SAFE_WEIGHTS_NAME).is_file() or (folder / WEIGHTS_NAME).is_file()
    if has_adapters(inner) and not (has_full_weights or (has_fsdp_weights(folder) and not list_adapters(folder))):
        if complaints := load_adapters(inner, folder, is_trainable=to_resume) or load_non_adapter_params(inner, folder):
            raise RuntimeError(_describe_mismatch(folder, listed(complaints, MAX_LISTED_NAMES)))
        return
    state, differences = match_to_model(inner, read_weights(folder))
    names = set(state)
    try:
        result = inner.load_state_dict(state, False)
    except RuntimeError as error:
        raise RuntimeError(_describe_mismatch(folder, str(differences) or str(error))) from error
    missing = [name for name in result.missing_keys if name in state or name in differences.missing]
    unexpected = [name for name in differences.unexpected if name not in names or name in result.unexpected_keys]
    refuse_mismatched_weights(inner, folder, Differences(missing, unexpected), to_resume)
    (on_key_mismatch or log_key_mismatch)(type(result)(missing, unexpected))


def materialize_expanded_tensors(model: nn.Module) -> None:
    """Make tensors of `expand` contiguous, since torch cannot load into them."""
    for tensor in (*model.parameters(), *model.buffers()):
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
        if is_plain and 0 in tensor.stride():
            tensor.data = tensor.data.contiguous()


def refuse_mismatched_weights(model: nn.Module, folder: Path, differences: Differences, to_resume: bool) -> None:
    """Raise a RuntimeError for another model's weights; allow missing buffers and frozen parameters."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if differences.shapes or (to_resume and (differences.unexpected or trained.intersection(differences.missing))):
        raise RuntimeError(_describe_mismatch(folder, str(differences)))


def log_key_mismatch(load_result: Any) -> None:
    if differences := Differences(list(load_result.missing_keys), list(load_result.unexpected_keys)):
        logger.warning("Weights were loaded that do not match the model: %s.", differences)


def _describe_mismatch(folder: Path, text: str) -> str:
    return (
        f"The weights in {folder} are not those of this model: {text}. Make the model as it was when the checkpoint "
        "was written, or load what fits by hand and start a new training."
    )


def match_to_model(model: nn.Module, stored: Mapping[str, Any]) -> tuple[dict[str, Any], Differences]:
    """Return stored weights under a model's names, and the remaining differences.

    If names differ in more than wrappers' prefixes and ties, transformers converts the weights, since it renames,
    splits and joins weights between releases.
    """
    state, differences = _rename_to_model(model, stored)
    inner: Any = unwrap_user_model(model)
    if not differences or not is_a(inner, "pretrained model") or has_adapters(inner):
        return state, differences
    try:
        converted, unused, shapes = _convert_names(inner, stored)
    except Exception as error:
        # For instance, the class cannot be constructed from its configuration.
        logger.debug("%s could not convert stored weights: %s", type(inner).__name__, error)
        return state, differences
    state, differences = _rename_to_model(model, converted)
    missing = [name for name in differences.missing if _strip_wrapper_prefixes(name) not in shapes]
    unexpected = [*dict.fromkeys([*differences.unexpected, *unused])]
    return state, Differences(missing, unexpected, [*dict.fromkeys([*shapes.values(), *differences.shapes])])


def _rename_to_model(model: nn.Module, stored: Mapping[str, Any]) -> tuple[dict[str, Any], Differences]:
    model_state = model.state_dict()
    others = stored.keys() - model_state.keys()
    plain = {_strip_wrapper_prefixes(name): name for name in model_state} if others else {}
    state = {plain.get(_strip_wrapper_prefixes(k), k) if k in others else k: value for k, value in stored.items()}
    for first, duplicates in find_tied_names(model_state).items():
        tied = (first, *duplicates)
        value = next((state[name] for name in tied if name in state), None)
        if value is not None:
            state = {**dict.fromkeys(tied, value), **state}
    differences = Differences.between(state, model_state)
    if not differences:
        return state, differences
    inner, ignored = unwrap_user_model(model), ("_keys_to_ignore_on_save", "_keys_to_ignore_on_load_missing")
    missing = _drop_ignored(differences.missing, inner, *ignored)
    unexpected = _drop_ignored(differences.unexpected, inner, "_keys_to_ignore_on_load_unexpected")
    return state, Differences(missing, unexpected, differences.shapes)


def describe_shape_mismatch(name: str, stored: Iterable[int], expected: Iterable[int]) -> str:
    return f"{name} is {tuple(stored)} in the checkpoint and {tuple(expected)} in the model"


def _convert_names(inner: Any, stored: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """Convert weights to the installed transformers' names; return also unconverted names and mismatched shapes."""
    wide = any(parameter.dtype == torch.float64 for parameter in inner.parameters())
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        # Initialisation must not advance the training's random generators.
        with torch.random.fork_rng(devices=[]):
            other, notes = type(inner).from_pretrained(
                None,
                config=copy.deepcopy(inner.config),
                state_dict=dict(stored),
                dtype=torch.float64 if wide else torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    finally:
        logging.disable(before)
    shapes = {name: describe_shape_mismatch(name, *pair) for name, *pair in notes["mismatched_keys"]}
    initialised = {*notes["missing_keys"], *shapes}
    unconverted = {name: stored[name] for name in (*notes["unexpected_keys"], *shapes) if name in stored}
    state = {name: value for name, value in other.state_dict().items() if name not in initialised}
    return {**unconverted, **state}, list(notes["unexpected_keys"]), shapes


def _strip_wrapper_prefixes(name: str) -> str:
    return name.removeprefix(WRAPPER_PREFIX).replace(f"{COMPILED_PART}.", "")


def _drop_ignored(names: Iterable[str], model: Any, *attributes: str) -> list[str]:
    patterns = [pattern for attribute in attributes for pattern in getattr(model, attribute, None) or ()]
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


# ---- Non-finite weights, which no training step repairs --------------------------------------------------------------

WEIGHT_FILE = re.compile(r".*\.safetensors|(.*/)?(pytorch|adapter)_model.*\.bin|littrainer_trained_beside_adapters\.pt")


def find_nonfinite_weights(model: nn.Module, with_buffers: bool = False, optimizer: Any = None) -> list[str]:
    """Return the names of non-finite weights; of sharded weights only local shards are read.

    Parameters:
        with_buffers: check saved buffers for nan; masks may be infinite.
        optimizer: check its states for nan.
    """
    states = tree_leaves([dict(state) for state in getattr(optimizer, "state", {}).values()])
    # Skip scalar step counts, which would each be copied separately.
    buffers = {
        str(index): state for index, state in enumerate(states) if isinstance(state, torch.Tensor) and state.ndim
    }
    for prefix, module in model.named_modules() if with_buffers else ():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}".removeprefix(".")] = buffer
    weights = {}
    for name, tensor in [*model.named_parameters(), *buffers.items()]:
        weight = getattr(tensor, "_local_tensor", tensor).detach()
        weight = torch.view_as_real(weight) if weight.is_complex() else weight
        if weight.is_floating_point() and weight.itemsize > 1 and not weight.is_meta and weight.numel():
            weights[name] = weight
    # A finite norm proves that all weights are finite; an infinite norm may be an overflow.
    if math.isfinite(nn.utils.get_total_norm(weights.values())):
        return []

    def is_nonfinite(name: str, weight: torch.Tensor) -> bool:
        extrema = [*map(float, weight.aminmax())]
        return any(map(math.isnan, extrema)) or not (name in buffers or all(map(math.isfinite, extrema)))

    return [name for name, weight in weights.items() if is_nonfinite(name, weight)]


# ---- PEFT adapters, whose checkpoints lack the frozen weights --------------------------------------------------------

ADAPTER_WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
# Trained parameters that PEFT does not save: p-tuning's encoder, and unfrozen base parameters.
NON_ADAPTER_PARAMS_NAME = "littrainer_trained_beside_adapters.pt"
# Adapter in the checkpoint's folder itself; other adapters are in subfolders.
DEFAULT_ADAPTER = "default"
PEFT_PREFIX = "base_model.model."


def has_adapters(model: Any) -> bool:
    return is_a(model, "peft model") or bool(getattr(model, "_hf_peft_config_loaded", False))


def list_adapters(folder: Path) -> dict[str, Path]:
    """Return the folders of a checkpoint's adapters by name; the checkpoint's folder has the name ""."""
    folders = {"": folder} if _find_weights_file(folder) is not None else {}
    for entry in sorted(folder.iterdir()):
        # A run's folder contains checkpoints.
        if entry.is_dir() and checkpoint_step(entry) is None and _find_weights_file(entry) is not None:
            folders[entry.name] = entry
    return folders


def load_adapters(model: Any, folder: Path, *, is_trainable: bool) -> list[str]:
    """Load adapters into a model that has them, and return mismatches."""
    from peft import set_peft_model_state_dict

    folders, active = list_adapters(folder) or {"": folder}, _active_adapters(model)
    # A single adapter is loaded into the active adapter.
    paths = {(active[0] if list(folders) == [""] else name or DEFAULT_ADAPTER): path for name, path in folders.items()}
    stored = {}
    for name, path in paths.items():
        if name not in model.peft_config:
            raise ValueError(
                f"{path} holds an adapter named {name!r}, and the model has {', '.join(map(repr, model.peft_config))}. "
                "Add the adapter to the model before resuming."
            )
        stored[name] = read_adapter(path)
        if not is_a(model, "peft model"):
            stored[name] = {key.removeprefix(PEFT_PREFIX): value for key, value in stored[name].items()}
    compared = {name: _differences(model, name, state) for name, state in stored.items()}
    complaints = [f"adapter {name!r}: {differences}" for name, differences in compared.items() if differences]
    complaints += [f"adapter {name!r}: not in the checkpoint" for name in active if name not in paths]
    if not complaints:
        for name, state in stored.items():
            set_peft_model_state_dict(model, state, adapter_name=name)
        if not is_trainable and is_a(model, "peft model"):
            model.eval()
    return complaints


def _active_adapters(model: Any) -> list[str]:
    return list(model.active_adapters) if is_a(model, "peft model") else model.active_adapters()


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """Load an adapter, with the file's names."""
    path = _find_weights_file(folder)
    if path is None:
        raise ValueError(
            f"No adapter in {folder}: expected {' or '.join(ADAPTER_WEIGHTS_NAMES)}. Give a folder that "
            "save_pretrained or a Trainer wrote of this model."
        )
    return load_safetensors(path) if path.suffix == ".safetensors" else load_tensors(path)


def write_non_adapter_params(model: Any, folder: Path, state_dict: Mapping[str, Any] | None = None) -> None:
    model_state = model.state_dict()
    weights = model_state if state_dict is None else state_dict
    names = _find_trained_outside_adapters(model, model_state)
    (folder / NON_ADAPTER_PARAMS_NAME).unlink(missing_ok=True)
    if names:
        torch.save({name: weights.get(name, model_state[name]) for name in names}, folder / NON_ADAPTER_PARAMS_NAME)


def load_non_adapter_params(model: Any, folder: Path) -> list[str]:
    """Load the file of `write_non_adapter_params`, and return mismatches; warn of parameters in no file."""
    model_state = model.state_dict()
    path = folder / NON_ADAPTER_PARAMS_NAME
    stored = load_tensors(path) if path.is_file() else {}
    shapes = {name: value.shape for name, value in model_state.items() if isinstance(value, torch.Tensor)}
    if mismatched := [name for name, value in stored.items() if shapes.get(name) != value.shape]:
        return [f"{name} in {NON_ADAPTER_PARAMS_NAME} is not the model's" for name in mismatched]
    if absent := [name for name in _find_trained_outside_adapters(model, model_state) if name not in stored]:
        logger.warning(
            "%s does not hold %s, which is trained: PEFT does not save it. It stays as it is, and numbers differ from "
            "those of an uninterrupted training.",
            folder,
            listed(absent, MAX_LISTED_NAMES),
        )
    model.load_state_dict(stored, strict=False)
    return []


def _find_trained_outside_adapters(model: Any, model_state: Mapping[str, Any]) -> list[str]:
    from peft import get_peft_model_state_dict

    names = list(model.peft_config) if is_a(model, "peft model") else _active_adapters(model)
    saved = {
        tensor.data_ptr()
        for name in names
        for tensor in get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False).values()
    }
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    state = {name: model_state[name] for name in trained if name in model_state}
    return [name for name, tensor in state.items() if tensor.numel() and tensor.data_ptr() not in saved]


def _find_weights_file(folder: Path) -> Path | None:
    return next((folder / name for name in ADAPTER_WEIGHTS_NAMES if (folder / name).is_file()), None)


def _differences(model: Any, name: str, stored: dict[str, torch.Tensor]) -> Differences:
    from peft import get_peft_model_state_dict

    # PEFT stores embeddings if their size has changed.
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    differences = Differences.between(stored, state)
    unexpected = [key for key in differences.unexpected if "embed" not in key and "lm_head" not in key]
    return replace(differences, unexpected=unexpected)


def read_adapter_weights(model: Any, folder: Path) -> dict[str, Any]:
    parameters = [name for name, _ in model.named_parameters()]
    folders, weights = list_adapters(folder), dict[str, Any]()
    for adapter in getattr(model, "peft_config", {}):
        source = folders.get(adapter) or folders.get("")
        if source is None:
            continue
        names = {
            name.replace(f".modules_to_save.{adapter}.", ".").replace(f".{adapter}.", "."): name
            for name in parameters
            if f".{adapter}." in name
        }
        # transformers' models lack the prefix of the file's names.
        stored = {
            name if name in names else name.removeprefix(PEFT_PREFIX): value
            for name, value in read_adapter(source).items()
        }
        if unexpected := [name for name in stored if name not in names]:
            raise ValueError(
                f"The adapter in {source} is not one of this model: it has {', '.join(unexpected[:8])}. Make the model "
                "as it was when the checkpoint was written."
            )
        weights.update({names[name]: value for name, value in stored.items()})
    if not weights:
        raise ValueError(f"{folder} holds no adapter that this model has. Resume from another checkpoint.")
    return weights
