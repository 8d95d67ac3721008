"""Going through the modules of a model at each optimizer step, in a fraction of the time that torch's generators take.

torch's `train()`, `parameters()` and `zero_grad()` go through nested generators, one for each level of the model, and
build the name of each parameter on the way: for a BERT of 51 modules, three of these walks take as long as a fifth of
its forward pass. These functions do what those methods do, and call them if a model has its own.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from littrainer.runtime.lazy_isinstance import loaded_classes

# Types of `_modules`, unless the class keeps its modules elsewhere, as TorchScript does.
PLAIN_CONTAINERS = (dict, OrderedDict)
TORCHS_TRAIN = (nn.Module.train, DistributedDataParallel.train)
# Methods that `parameters()` of a model calls.
WALKS = ("parameters", "named_parameters", "_named_members")
# Numbers in a buffer of whole numbers from which on it is a quantized weight or a mask, which no forward pass changes.
MIN_NUMBERS_OF_WEIGHT = 2**20


def set_training_mode(model: Any) -> None:
    """Put a model and all in it into training mode, as `model.train()` does."""
    modules = list_modules(model) if isinstance(model, nn.Module) else []
    for module in modules:
        has_own_train = "train" in module.__dict__ or type(module).train not in TORCHS_TRAIN
        if not module.training or (has_own_train and not _adds_nothing(module)):
            model.train()
            return
    if not modules:
        model.train()


def _adds_nothing(module: Any) -> bool:
    """Return whether a `train()` that is not torch's does no more than that."""
    own = type(module).train
    # If transformers has put its kernels in, it may do so again. `loaded_classes` would be slower at each micro-batch.
    loaded = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return loaded is not None and own is loaded.train and not getattr(module, "use_kernels", True)


def list_parameters(model: Any) -> list[nn.Parameter]:
    """Return the parameters of a model, each once, in the order of `model.parameters()`."""
    kind = type(model)
    for name in WALKS:
        if getattr(kind, name, None) is not getattr(nn.Module, name) or name in vars(model):
            return list(model.parameters())
    found: dict[int, nn.Parameter] = {}
    for module in list_modules(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), parameter)
    return list(found.values())


def find_model_device(model: nn.Module) -> torch.device | None:
    """Return the device of a model's parameters; None if it has none, or has them on several."""
    devices = {parameter.device for parameter in list_parameters(model)}
    return devices.pop() if len(devices) == 1 else None


def clear_gradients(model: Any, parameters: list[nn.Parameter] | None = None) -> None:
    """Let no parameter of a model, or none of all its parameters, have a gradient, as `model.zero_grad()` does."""
    if getattr(type(model), "zero_grad", None) is not nn.Module.zero_grad or "zero_grad" in vars(model):
        model.zero_grad()
        return
    for parameter in list_parameters(model) if parameters is None else parameters:
        if parameter.grad is not None:
            parameter.grad = None


def move_model(model: Any, device: torch.device) -> None:
    """Put a model on a device by its `to()`, unless it stays in place, or all of a model that has torch's is there."""
    if not is_immovable(model) and not (_moves_as_torch_does(model) and is_on_device(model, device)):
        model.to(device)


def is_immovable(model: nn.Module) -> bool:
    """Return whether a model must not be moved: a device map has spread it, or bitsandbytes has quantized it.

    A device map may have put parts of the model, or of a module in it, on several devices or on disk.
    """
    for module in list_modules(model):
        own = vars(module)
        if len(own.get("hf_device_map") or ()) > 1 or own.get("quantization_method") == "bitsandbytes":
            return True
    return False


def _moves_as_torch_does(model: Any) -> bool:
    to = getattr(type(model), "to", None)
    return "to" not in vars(model) and (
        to is nn.Module.to or any(to is kind.to for kind in loaded_classes("model of transformers"))  # type: ignore[attr-defined]
    )


def is_on_device(model: nn.Module, device: torch.device) -> bool:
    """Return whether all parameters and buffers of a model are on a device, which torch knows of.

    No if a module overrides `_apply()`, which `to()` of the model calls and which may move more than those.
    """
    for module in list_modules(model):
        if type(module)._apply is not nn.Module._apply or "_apply" in module.__dict__:
            return False
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None and tensor.device != device:
                    return False
    return True


def copy_buffers(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]:
    """Return buffers that a forward pass may change, each with its module, its name there and a copy."""
    return [
        (module, name, buffer, buffer.detach().clone())
        for module in list_modules(model)
        for name, buffer in module._buffers.items()
        if buffer is not None and (buffer.is_floating_point() or buffer.numel() < MIN_NUMBERS_OF_WEIGHT)
    ]


def restore_buffers(buffers: list[Any]) -> None:
    """Give `copy_buffers` the values and shapes that they had, in their own memory."""
    for module, name, buffer, value in buffers:
        if buffer.shape != value.shape:
            buffer.data = buffer.data.resize_(value.shape)
        buffer.data.copy_(value)
        module._buffers[name] = buffer


def list_modules(model: nn.Module) -> list[nn.Module]:
    """Return a model and all modules in it, each once, in the order of `model.modules()`."""
    found: dict[int, nn.Module] = {}
    pending: list[Any] = [model]
    while pending:
        module = pending.pop()
        if module is None or id(module) in found:
            continue
        kind, inner = type(module), module._modules
        if (
            kind.named_modules is not nn.Module.named_modules
            or kind.modules is not nn.Module.modules
            or type(inner) not in PLAIN_CONTAINERS
        ):
            return list(model.modules())
        found[id(module)] = module
        if inner:
            pending.extend(reversed(inner.values()))
    return list(found.values())
