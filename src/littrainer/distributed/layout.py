"""Layout of the processes: a grid of `dp_replicate` x `dp_shard` x `cp` or `sp` x `tp`, outermost dimension first.

Processes that differ in `cp`, `sp` or `tp` only see the same data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from littrainer.distributed.environment import TRUE_VALUES, USE_FSDP, is_env_true
from littrainer.runtime.lazy_isinstance import is_a

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Sizes in `parallelism_config`, in the order of the grid.
SIZES = ("dp_replicate_size", "dp_shard_size", "cp_size", "sp_size", "tp_size")
# Further fields of accelerate's ParallelismConfig. The backends have a single value, and `tp_handler` no effect.
FURTHER_SETTINGS = ("cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler")
# Handler -> its fields in accelerate.
SEQUENCE_SETTINGS = {
    "sp_handler": ("sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"),
    "cp_handler": ("cp_comm_strategy",),
}
CP_STRATEGIES = ("allgather", "alltoall")
MESH_DIMENSIONS = ("dp_replicate", "dp_shard", "tp")
# Environment variables of `accelerate launch --use_parallelism_config`.
SWITCH_VARIABLE = "ACCELERATE_USE_PARALLELISM_CONFIG"
SIZE_VARIABLE_PREFIX = "PARALLELISM_CONFIG_"
# Attribute of the arguments: the layout of a model that was sharded before it was passed to the Trainer.
_SIZES_OF_MODEL = "_layout_of_model"


@dataclass(frozen=True)
class ProcessLayout:
    """Sizes of the grid of processes; their product is the world size.

    Parameters:
        replicas: copies of the model, sharded or not, each with different data.
        shards: processes that shard a copy's parameters, each with different data.
        tensor_parallel: processes that compute each layer together, on the same data.
        sequence_parallel: processes that share each sequence, `cp_size` or `sp_size`.
        is_given: whether this layout was requested; else all processes are replicas.
    """

    replicas: int
    shards: int
    tensor_parallel: int
    sequence_parallel: int
    is_given: bool

    @property
    def data_parallel(self) -> int:
        return self.replicas * self.shards

    @property
    def model_parallel(self) -> int:
        """Number of neighbouring processes with the same data."""
        return self.tensor_parallel * self.sequence_parallel


def get_requested_sizes(args: Any) -> tuple[str, dict[str, int]]:
    """Return the source of the sizes, for errors, and `SIZES` with their values; default: 1."""
    source, config = _read_requested(args)
    sizes = dict.fromkeys(SIZES, 1)
    if not config:
        return source, sizes
    for name in SIZES:
        if config.get(name) is not None:
            sizes[name] = _parse_size(source, name, config[name])
    _refuse_combinations(source, sizes)
    if sizes["cp_size"] * sizes["sp_size"] > 1:
        get_sequence_settings(args)
    return source, sizes


def _refuse_combinations(source: str, sizes: Mapping[str, int]) -> None:
    names = [name for name in ("cp_size", "sp_size", "tp_size") if sizes[name] > 1]
    if len(names) > 1:
        raise NotImplementedError(
            f"littrainer does not support {source} with {' and '.join(f'{name}={sizes[name]}' for name in names)} at "
            "once. Leave all of them but one at 1, and use dp_shard_size for weights that do not fit."
        )


@dataclass(frozen=True)
class SequenceSettings:
    """Settings of sequence and context parallelism.

    Parameters:
        gathers_keys: whether keys and values are gathered; else heads are exchanged for positions.
        length: length of all rows; None: any.
        attention: attention implementation to train with; None: the model's.
    """

    gathers_keys: bool
    length: int | None
    attention: str | None


def get_sequence_settings(args: Any) -> SequenceSettings:
    """Return the settings of `sp_handler` and `cp_handler`.

    Raises:
        ValueError: a key or a value is unknown.
    """
    source, config = _read_requested(args)
    values: dict[str, Any] = {}
    for handler, names in SEQUENCE_SETTINGS.items():
        entries = config.get(handler) or {}
        entries = dict(entries) if isinstance(entries, Mapping) else vars(entries)
        unknown = [repr(name) for name in entries if name not in names]
        if unknown:
            raise ValueError(f"{source} has {handler} with {', '.join(unknown)}. Known are {', '.join(names)}.")
        values |= entries
    strategy = values.get("cp_comm_strategy") or CP_STRATEGIES[0]
    choices = {"cp_backend": ("torch",), "sp_backend": ("deepspeed",), "cp_comm_strategy": CP_STRATEGIES}
    for name, supported in choices.items():
        value = strategy if name == "cp_comm_strategy" else config.get(name)
        if value is not None and value not in supported:
            raise ValueError(f"{source} has {name}={value!r}; choose {' or '.join(supported)}, or leave it out.")
    is_variable = values.get("sp_seq_length_is_variable")
    length = None
    if is_variable is not None and str(is_variable).lower() not in TRUE_VALUES:
        length = _parse_size(source, "sp_seq_length", values.get("sp_seq_length"))
    gathers_keys = _parse_size(source, "cp_size", config.get("cp_size") or 1) > 1 and strategy == CP_STRATEGIES[0]
    return SequenceSettings(gathers_keys, length, values.get("sp_attn_implementation"))


def get_process_layout(args: Any) -> ProcessLayout:
    """Return the grid that `parallelism_config`, the launcher's environment or a sharded model requests."""
    source, sizes = get_requested_sizes(args)
    sizes_of_model = vars(args).get(_SIZES_OF_MODEL)
    if sizes_of_model is not None:
        source = "the sharded model"
        sizes = sizes | sizes_of_model
        _refuse_combinations(source, sizes)
    total = math.prod(sizes.values())
    if total == 1:
        return ProcessLayout(args.world_size, 1, 1, 1, is_given=False)
    if total != args.world_size:
        product = " x ".join(
            f"{name}={sizes[name]}" for name in SIZES if sizes[name] > 1 or name not in ("cp_size", "sp_size")
        )
        raise ValueError(
            f"{source} lays out {product} = {total} processes, and there are {args.world_size}. Let the product be "
            f"{args.world_size}, or start {total}."
        )
    sequence_parallel = sizes["cp_size"] * sizes["sp_size"]
    return ProcessLayout(
        sizes["dp_replicate_size"], sizes["dp_shard_size"], sizes["tp_size"], sequence_parallel, is_given=True
    )


def data_parallel_size(args: Any) -> int:
    return get_process_layout(args).data_parallel


def data_parallel_rank(args: Any) -> int:
    return args.process_index // get_process_layout(args).model_parallel


def model_parallel_size(args: Any) -> int:
    """Return the number of neighbouring processes with the same data."""
    return get_process_layout(args).model_parallel


def model_parallel_rank(args: Any) -> int:
    return args.process_index % get_process_layout(args).model_parallel


def tensor_parallel_size(args: Any) -> int:
    return get_process_layout(args).tensor_parallel


def get_sharding_sizes(args: Any) -> tuple[int, int]:
    """Return the number of replicas, and of shards of each; default: a single replica.

    Processes that share sequences hold different shards.
    """
    layout = get_process_layout(args)
    if not layout.is_given:
        return 1, layout.data_parallel
    shards = layout.shards * layout.sequence_parallel
    if shards == 1 and layout.data_parallel > 1:
        raise ValueError(
            f"fsdp shards over dp_shard_size, and parallelism_config leaves it at 1 with dp_replicate_size="
            f"{layout.replicas}. Set dp_shard_size={layout.data_parallel}, or leave fsdp out."
        )
    return layout.replicas, shards


def device_mesh(args: Any, replicas: int, shards: int) -> DeviceMesh:
    """Create a mesh of all processes; a collective call."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (replicas, shards, tensor_parallel_size(args))
    return init_device_mesh(args.device.type, shape, mesh_dim_names=MESH_DIMENSIONS)


def set_layout_from_model(args: Any, model: Any) -> None:
    """Use the layout of a model that transformers has sharded; it overrides `parallelism_config`."""
    vars(args).pop(_SIZES_OF_MODEL, None)
    tp_size = getattr(model, "_tp_size", None) or 1
    if tp_size > 1:
        _check_no_plain_slices(model, tp_size)
        settings = getattr(getattr(model, "config", None), "distributed_config", None)
        shards = getattr(settings, "fsdp_size", None) or 1
        replicas = getattr(settings, "dp_replicate_size", None) or 1
        vars(args)[_SIZES_OF_MODEL] = {"tp_size": tp_size, "dp_shard_size": shards, "dp_replicate_size": replicas}
    layout = get_process_layout(args)
    if not layout.is_given or tp_size > 1:
        return
    if args.deepspeed and layout.replicas != args.world_size:
        raise ValueError(
            f"deepspeed lays its processes out by itself, and parallelism_config asks for dp_shard_size="
            f"{layout.shards} and {layout.model_parallel} processes with the same data. Set only one of them."
        )
    if layout.shards > 1 and not (args.fsdp or is_env_true(USE_FSDP)):
        raise ValueError(
            f"parallelism_config has dp_shard_size={layout.shards}, and fsdp, which shards, is not switched on. Set "
            f"fsdp=True, or dp_replicate_size={layout.data_parallel} in its place."
        )


def _check_no_plain_slices(model: Any, processes: int) -> None:
    # transformers 5.3 splits into plain tensors: each process would clip by, and save, its slice only.
    if not any(is_a(parameter, "sharded tensor") for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} was split over {processes} processes when it was loaded, into plain tensors, "
            "which cannot be put together again. Load it whole and set parallelism_config={'tp_size': "
            f"{processes}}}, or update transformers: later releases (5.23 for one) split into DTensors."
        )


def _read_requested(args: Any) -> tuple[str, Mapping[str, Any]]:
    config: Any = getattr(args, "parallelism_config", None)
    source = "parallelism_config"
    if config is None:
        if os.environ.get(SWITCH_VARIABLE, "").strip().lower() == "true":
            source = "the environment of accelerate launch"
            requested: dict[str, Any] = {name: _read_variable(name) or "1" for name in SIZES}
            for handler, names in SEQUENCE_SETTINGS.items():
                requested[handler] = {name: _read_variable(name) for name in names}
            return source, requested
        return source, {}
    if isinstance(config, Mapping):
        unknown = [repr(name) for name in config if name not in (*SIZES, *FURTHER_SETTINGS)]
        if unknown:
            raise ValueError(f"{source} has unknown keys: {', '.join(unknown)}. Known are {', '.join(SIZES)}.")
        return source, config
    if isinstance(config, type) or not all(hasattr(config, name) for name in SIZES):
        raise TypeError(
            f"{source}={config!r} is not usable; give a dict with some of {', '.join(SIZES)}, or an instance of "
            "accelerate's ParallelismConfig."
        )
    return source, {name: getattr(config, name, None) for name in (*SIZES, *FURTHER_SETTINGS)}


def _read_variable(name: str) -> str | None:
    value = os.environ.get(SIZE_VARIABLE_PREFIX + name.upper(), "").strip()
    return None if value in ("", "None") else value


def _parse_size(source: str, name: str, value: Any) -> int:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{source} has {name}={value!r}; it has to be a whole number from 1 up.")
    return number
