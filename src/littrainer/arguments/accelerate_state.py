"""What libraries on top ask accelerate's global state for, set up with the facts of the arguments.

Loggers of accelerate refuse to log, and its collectives to gather, before that state exists. It is set up where
accelerate is loaded already, or where somebody asks for it; nothing here needs accelerate.
"""

from __future__ import annotations

import importlib
import os
import sys
from enum import Enum
from typing import TYPE_CHECKING, Any

from littrainer.arguments.deepspeed_plugin import asks_for_deepspeed
from littrainer.arguments.sharding import sharding_plan

if TYPE_CHECKING:
    from littrainer.arguments.process import ProcessFacts


class DistributedType(str, Enum):
    """Those of accelerate's kinds of set-ups that occur here; members equal accelerate's of the same name."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"

    __str__ = Enum.__str__
    __hash__ = str.__hash__


def accelerate_is_loaded() -> bool:
    """Whether something in this process has imported accelerate's state."""
    return hasattr(sys.modules.get("accelerate.state"), "AcceleratorState")


def distributed_type(args: ProcessFacts) -> Any:
    """Whether processes train together and on what, as accelerate names it."""
    kind = DistributedType.NO
    if asks_for_deepspeed(args):
        kind = DistributedType.DEEPSPEED
    elif args.world_size > 1 and sharding_plan(args) is not None:
        kind = DistributedType.FSDP
    elif args.world_size > 1:
        kind = DistributedType.MULTI_CPU if args.device.type == "cpu" else DistributedType.MULTI_GPU
    return sys.modules["accelerate.state"].DistributedType(kind.value) if accelerate_is_loaded() else kind


def partial_state(args: ProcessFacts, load: bool = False) -> Any:
    """accelerate's PartialState with the facts of these arguments; None where accelerate is not there.

    A state that says otherwise is made anew, as transformers does with each TrainingArguments, unless
    `use_configured_state` asks for the one that a script has set up.

    Parameters:
        load: import accelerate if it is installed; else only what is loaded counts.
    """
    if load:
        try:
            importlib.import_module("accelerate.state")
        except ImportError:
            return None
    if not accelerate_is_loaded() or not (load or _needs_no_rendezvous(args)):
        return None
    state: Any = sys.modules["accelerate.state"]
    shared = state.PartialState._shared_state
    # Not `args.device`, which keeps what it finds: a script may still set use_cpu.
    on_cpu = (vars(args).get("_device") or args._find_device()).type == "cpu"
    if shared and not getattr(args.accelerator_config, "use_configured_state", False):
        facts = {"num_processes": args.world_size, "process_index": args.process_index}
        agrees = all(shared.get(name) == value for name, value in facts.items())
        agrees = agrees and (shared.get("distributed_type") == DistributedType.DEEPSPEED) == asks_for_deepspeed(args)
        if not agrees or (getattr(shared.get("device"), "type", None) == "cpu") != on_cpu:
            state.AcceleratorState._reset_state(reset_partial_state=True)
    made = state.PartialState(cpu=on_cpu, backend=args.ddp_backend, timeout=args.ddp_timeout_delta)
    if asks_for_deepspeed(args):
        shared["distributed_type"] = state.DistributedType.DEEPSPEED
    return made


def _needs_no_rendezvous(args: ProcessFacts) -> bool:
    import torch.distributed

    # Where a launcher has set ranks, making the state brings the process group up, which waits for the others.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return True
    return args.world_size == 1 and ("LOCAL_RANK" not in os.environ or "MASTER_ADDR" in os.environ)
