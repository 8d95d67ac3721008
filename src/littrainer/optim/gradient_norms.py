"""Clipping gradients by their norm, also where parameters are split between processes over one or several meshes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from littrainer.distributed.collectives import whole_tensor

UNSPLIT = {nn.Parameter, torch.Tensor}


def clip_by_norm(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale gradients down so that their norm, over the whole of each of them, is at most `max_norm`.

    Parameters:
        parameters: what has the gradients.
        max_norm: infinity leaves the gradients as they are.

    Returns:
        the norm before, the same in all processes that share the parameters.
    """
    given = list(parameters)
    if not _any_is_split(given):
        return nn.utils.clip_grad_norm_(given, max_norm, norm_type=norm_type)
    groups = list(_by_mesh(given).values()) or [[]]
    norms = [_norm_of(group, norm_type) for group in groups]
    total = norms[0]
    if len(norms) > 1:
        total = torch.linalg.vector_norm(torch.stack([norm.to(total.device) for norm in norms]), norm_type)
    if max_norm != float("inf"):
        for group in groups:
            nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def lie_on_several_meshes(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether gradients are split between different processes, or some of them are and others are not.

    A tensor parallel model may have both kinds, and torch computes a norm over one kind only.
    """
    return _any_is_split(parameters) and len(_by_mesh(parameters)) > 1


def _any_is_split(parameters: Iterable[nn.Parameter]) -> bool:
    # One that is split is of a class of its own; a process that trains alone has none, and asks no further.
    return any(hasattr(kind, "device_mesh") for kind in set(map(type, parameters)) - UNSPLIT)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> dict[Any, list[nn.Parameter]]:
    groups: dict[Any, list[nn.Parameter]] = {}
    for one in parameters:
        if one.grad is not None:
            groups.setdefault(getattr(one.grad, "device_mesh", None), []).append(one)
    return groups


def _norm_of(parameters: list[nn.Parameter], norm_type: float) -> torch.Tensor:
    """The norm of the whole gradients of parameters on one mesh, or on none."""
    gradients: list[Any] = [one.grad for one in parameters]
    mesh = getattr(gradients[0], "device_mesh", None) if gradients else None
    if mesh is None or mesh.device_type == gradients[0].device.type:
        return whole_tensor(nn.utils.get_total_norm(gradients, norm_type))
    from torch.distributed.tensor import DTensor

    # Offloaded gradients lie on the host, where the processes may have nothing to talk through.
    norms: list[Any] = [torch.linalg.vector_norm(one, norm_type) for one in gradients]
    moved: list[Any] = [
        DTensor.from_local(norm.to_local().to(mesh.device_type), mesh, norm.placements) for norm in norms
    ]
    return whole_tensor(torch.linalg.vector_norm(torch.stack(moved), norm_type))
