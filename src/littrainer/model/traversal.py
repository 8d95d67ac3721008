"""Going through the modules of a model at each optimizer step, in a fraction of the time that torch's generators take.

torch's `train()`, `parameters()` and `zero_grad()` go through nested generators, one for each level of the model, and
build the name of each parameter on the way: for a BERT of 51 modules, three of these walks take as long as a fifth of
its forward pass. These functions do what those methods do, and call them if a model has its own.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from littrainer.errors.lazy_isinstance import known_classes

# What holds the modules below one, unless its class keeps them elsewhere, as TorchScript does.
PLAIN_CONTAINERS = (dict, OrderedDict)
TORCHS_TRAIN = (nn.Module.train, DistributedDataParallel.train)
# What `parameters()` of a model calls on it.
WALKS = ("parameters", "named_parameters", "_named_members")
# Read without a Python call for each module.
IS_TRAINING = attrgetter("training")


def train_all(model: Any) -> None:
    """Put a model and all in it into training mode, as `model.train()` does."""
    modules = _with_torchs_train(model)
    if modules is None or not all(map(IS_TRAINING, modules)):
        model.train()


def eval_all(model: Any) -> None:
    """Put a model and all in it into evaluation mode, as `model.eval()` does."""
    modules = _with_torchs_train(model)
    if modules is None or not _has_plain_eval(model):
        model.eval()
        return
    for module in modules:
        if not module.training:
            continue
        if type(module).__setattr__ is nn.Module.__setattr__:
            # torch's own looks for parameters first, and then does this.
            object.__setattr__(module, "training", False)
        else:
            module.training = False


def _with_torchs_train(model: Any) -> list[nn.Module] | None:
    """Return the modules of a model whose `train()` does no more than torch's; None if one has another."""
    if not isinstance(model, nn.Module):
        return None
    found = modules_of(model)
    for module in found:
        if "train" in module.__dict__ or (type(module).train not in TORCHS_TRAIN and not _adds_nothing(module)):
            return None
    return found


def _has_plain_eval(model: Any) -> bool:
    own = type(model).eval
    return "eval" not in vars(model) and (
        # That of transformers calls `train(False)`.
        own is nn.Module.eval or any(own is kind.eval for kind in known_classes("model of transformers"))  # type: ignore[attr-defined]
    )


def _adds_nothing(module: Any) -> bool:
    """Return whether a `train()` that is not torch's does no more than that."""
    own = type(module).train
    # If transformers has put its kernels in, it may do so again. Asked for each model within a model at each
    # micro-batch, and so without going through `known_classes`.
    loaded = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return loaded is not None and own is loaded.train and not getattr(module, "use_kernels", True)


def parameters_of(model: Any) -> list[nn.Parameter]:
    """Return the parameters of a model, each once, in the order of `model.parameters()`."""
    kind = type(model)
    for name in WALKS:
        if getattr(kind, name, None) is not getattr(nn.Module, name) or name in vars(model):
            return list(model.parameters())
    found: dict[int, nn.Parameter] = {}
    for module in modules_of(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), parameter)
    return list(found.values())


def model_device(model: nn.Module) -> torch.device | None:
    """Return the device of a model's parameters; None if it has none, or has them on several."""
    devices = {parameter.device for parameter in parameters_of(model)}
    return devices.pop() if len(devices) == 1 else None


def clear_gradients(model: Any, parameters: list[nn.Parameter] | None = None) -> None:
    """Let no parameter of a model have a gradient, as `model.zero_grad()` does.

    Parameters:
        parameters: all of the model, if they are known.
    """
    if getattr(type(model), "zero_grad", None) is not nn.Module.zero_grad or "zero_grad" in vars(model):
        model.zero_grad()
        return
    for parameter in parameters_of(model) if parameters is None else parameters:
        if parameter.grad is not None:
            parameter.grad = None


def move_to(model: Any, device: torch.device) -> None:
    """Put a model on a device by its `to()`, unless it stays in place, or all of a model that has torch's is there."""
    if not stays_in_place(model) and not (_moves_as_torch_does(model) and is_on(model, device)):
        model.to(device)


def stays_in_place(model: nn.Module) -> bool:
    """Return whether a model must not be moved: a device map has spread it, or bitsandbytes has quantized it.

    A device map may have put parts of the model, or of a module in it, on several devices or on disk.
    """
    for module in modules_of(model):
        own = vars(module)
        if len(own.get("hf_device_map") or ()) > 1 or own.get("quantization_method") == "bitsandbytes":
            return True
    return False


def _moves_as_torch_does(model: Any) -> bool:
    to = getattr(type(model), "to", None)
    return "to" not in vars(model) and (
        to is nn.Module.to or any(to is kind.to for kind in known_classes("model of transformers"))  # type: ignore[attr-defined]
    )


def is_on(model: nn.Module, device: torch.device) -> bool:
    """Return whether all parameters and buffers of a model are on a device, as far as torch knows of them.

    No if a module overrides `_apply()`, which `to()` of the model calls and which may move more than those.
    """
    for module in modules_of(model):
        if type(module)._apply is not nn.Module._apply or "_apply" in module.__dict__:
            return False
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None and tensor.device != device:
                    return False
    return True


def modules_of(model: nn.Module) -> list[nn.Module]:
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
