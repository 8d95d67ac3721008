"""Fast traversal of a model's modules at each optimizer step.

torch's `train()`, `parameters()` and `zero_grad()` use nested generators and build the name of each parameter: for a
BERT of 51 modules, three traversals take a fifth of a forward pass. The functions below are equivalent, and call the
methods if a model overrides them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from littrainer.runtime.lazy_isinstance import loaded_classes

TORCH_TRAIN_METHODS = (nn.Module.train, DistributedDataParallel.train)
# Methods that `parameters()` of a model calls.
PARAMETER_METHODS = ("parameters", "named_parameters", "_named_members")
# Integer buffers of this size are quantized weights or masks, which no forward pass changes.
MIN_ELEMENTS_OF_WEIGHT = 2**20


def set_training_mode(model: Any) -> None:
    if not isinstance(model, nn.Module):
        model.train()
        return
    pending: list[Any] = [model]
    while pending:
        module = pending.pop()
        if module is None:
            continue
        overrides_train = "train" in module.__dict__ or type(module).train not in TORCH_TRAIN_METHODS
        if not module.training or (overrides_train and not _has_plain_train(module)):
            model.train()
            return
        if inner := module._modules:
            pending.extend(inner.values())


def _has_plain_train(module: Any) -> bool:
    """Return whether a module's `train()` is transformers' and would install no kernels."""
    # By `sys.modules`, since `loaded_classes` would be slower at each micro-batch.
    pretrained = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    is_same = pretrained is not None and type(module).train is pretrained.train
    return is_same and not getattr(module, "use_kernels", True)


def list_parameters(model: Any) -> list[nn.Parameter]:
    """Return the unique parameters of a model in the order of `model.parameters()`."""
    kind = type(model)
    for name in PARAMETER_METHODS:
        if getattr(kind, name, None) is not getattr(nn.Module, name) or name in vars(model):
            return list(model.parameters())
    modules = list_modules(model)
    unique = {id(value): value for module in modules for value in module._parameters.values() if value is not None}
    return list(unique.values())


def has_method(model: Any, name: str) -> bool:
    """Return whether a model has a method; a failed look-up by `nn.Module.__getattr__` would take microseconds."""
    kind = type(model)
    if getattr(kind, "__getattr__", None) is nn.Module.__getattr__:
        return name in vars(model) or hasattr(kind, name)
    return hasattr(model, name)


def find_model_device(model: nn.Module) -> torch.device | None:
    """Return the device of all parameters; None without parameters or with several devices."""
    devices = {parameter.device for parameter in list_parameters(model)}
    return devices.pop() if len(devices) == 1 else None


def clear_gradients(model: Any, parameters: list[nn.Parameter] | None = None) -> None:
    """Set the gradients of the given or all parameters to None."""
    if getattr(type(model), "zero_grad", None) is not nn.Module.zero_grad or "zero_grad" in vars(model):
        model.zero_grad()
        return
    for parameter in list_parameters(model) if parameters is None else parameters:
        if parameter.grad is not None:
            parameter.grad = None


def move_model(model: Any, device: torch.device) -> None:
    """Move a model, unless it is immovable or known to be on the device."""
    if not (_has_torch_move(model) and is_on_device(model, device)) and not is_immovable(model):
        model.to(device)


def is_immovable(model: nn.Module) -> bool:
    """Return whether a model has a device map with several devices, or bitsandbytes quantization."""
    for module in list_modules(model):
        attributes = vars(module)
        has_device_map = len(attributes.get("hf_device_map") or ()) > 1
        if has_device_map or attributes.get("quantization_method") == "bitsandbytes":
            return True
    return False


def _has_torch_move(model: Any) -> bool:
    to = getattr(type(model), "to", None)
    return "to" not in vars(model) and (
        to is nn.Module.to or any(to is kind.to for kind in loaded_classes("model of transformers"))  # type: ignore[attr-defined]
    )


def is_on_device(model: nn.Module, device: torch.device) -> bool:
    """Return whether all parameters and buffers of a model are on a device.

    Modules that override `_apply()` may hold further tensors; the result is False for them.
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
    """Return (module, name, buffer, copy) of the buffers that a forward pass may change."""
    return [
        (module, name, buffer, buffer.detach().clone())
        for module in list_modules(model)
        for name, buffer in module._buffers.items()
        if buffer is not None and (buffer.is_floating_point() or buffer.numel() < MIN_ELEMENTS_OF_WEIGHT)
    ]


def restore_buffers(buffers: list[Any]) -> None:
    for module, name, buffer, value in buffers:
        if buffer.shape != value.shape:
            buffer.data = buffer.data.resize_(value.shape)
        buffer.data.copy_(value)
        module._buffers[name] = buffer


def list_modules(model: nn.Module) -> list[nn.Module]:
    """Return the unique modules of a model in the order of `model.modules()`."""
    unique: dict[int, nn.Module] = {}
    pending: list[Any] = [model]
    while pending:
        module = pending.pop()
        if module is not None and id(module) not in unique:
            unique[id(module)] = module
            if inner := module._modules:
                pending.extend(reversed(inner.values()))
    modules = list(unique.values())
    kinds: set[type[nn.Module]] = set(map(type, modules))
    for kind in kinds:
        if kind.named_modules is not nn.Module.named_modules or kind.modules is not nn.Module.modules:
            return list(model.modules())
    return modules
