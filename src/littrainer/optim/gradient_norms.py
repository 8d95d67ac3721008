"""Clipping gradients by their norm, also where parameters are split between processes over one or several meshes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

UNSPLIT = {nn.Parameter, torch.Tensor}


def clip_by_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0, several_meshes: bool | None = None
) -> torch.Tensor:
    """Scale gradients down so that their norm, over the whole of each of them, is at most `max_norm`.

    Parameters:
        parameters: what has the gradients.
        max_norm: infinity leaves the gradients as they are.
        several_meshes: whether `lie_on_several_meshes` says so of them; by default it is asked.

    Returns:
        the norm before, the same in all processes that share the parameters.
    """
    given = list(parameters)
    if several_meshes is None:
        several_meshes = lie_on_several_meshes(given)
    if not several_meshes:
        return _whole(nn.utils.clip_grad_norm_(given, max_norm, norm_type=norm_type))
    groups = list(_by_mesh(given).items())
    norms = [_whole(nn.utils.get_total_norm(_gradients(group), norm_type)) for _, group in groups]
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if max_norm != float("inf"):
        for mesh, group in groups:
            nn.utils.clip_grads_with_norm_(group, max_norm, total if mesh is None else _on_mesh(total, mesh))
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


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _on_mesh(total: torch.Tensor, mesh: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(total, mesh)


def _gradients(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [one.grad for one in parameters if one.grad is not None]
