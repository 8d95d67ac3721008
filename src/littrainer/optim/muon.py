"""`optim="muon"`: torch's Muon for the matrices within a model, AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from littrainer.model.facts import base_model

# Key of a parameter group: whether Muon steps it.
BY_MUON = "by_muon"
# Modules that make predictions of what a model has found out, if it does not have a `base_model` without them.
HEADS = re.compile(r"(?:^|[._])(?:heads?|classifier|score|outputs?|predictions)\d*(?:\.|$)")


def _embeddings(model: nn.Module) -> Iterable[nn.Parameter]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return (one for module in model.modules() if isinstance(module, kinds) for one in module.parameters())


def _heads(model: Any) -> Iterable[nn.Parameter]:
    within = base_model(model)
    base = getattr(within, "base_model", within)
    inner = {id(one) for one in base.parameters()} if isinstance(base, nn.Module) and base is not within else None
    return (
        one for name, one in model.named_parameters() if (HEADS.search(name) if inner is None else id(one) not in inner)
    )


def _no_matrices(model: nn.Module) -> Iterable[nn.Parameter]:
    return (one for one in model.parameters() if one.dim() != 2)


# What AdamW steps -> finds it in a model. A parameter that is several things, as an embedding that is the head too,
# counts once; the rest are matrices, and Muon's.
BY_ADAMW: dict[str, Callable[[nn.Module], Iterable[nn.Parameter]]] = {
    "embeddings": _embeddings,
    "heads": _heads,
    "norms, biases, convolutions and experts in one tensor": _no_matrices,
}


class MuonWithAdamW(Optimizer):
    """Muon and AdamW over the groups of one model; state dict, schedules and clipping see one optimizer.

    Parameters:
        params: parameter groups, each of which is split by what steps its parameters.
        by_adamw: the parameters that AdamW steps.
        lr: learning rate of Muon.
        adamw_lr: learning rate of AdamW.
        betas, eps: AdamW's.
        momentum, nesterov, ns_steps, adjust_lr_fn: Muon's.

    Raises:
        ValueError: Muon is left nothing to step.
    """

    def __init__(
        self,
        params: list[dict[str, Any]],
        *,
        by_adamw: Iterable[nn.Parameter],
        lr: float,
        adamw_lr: float,
        betas: tuple[float, float],
        eps: float,
        **settings: Any,
    ):
        others = {id(one) for one in by_adamw}
        groups: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in params:
            for by_muon, members in groups.items():
                chosen = [one for one in group["params"] if (id(one) not in others) is by_muon]
                if chosen:
                    members.append({**group, "params": chosen, BY_MUON: by_muon})
        if not groups[True]:
            raise ValueError(
                "optim='muon' steps matrices within the model, and found none that are trained besides embeddings and "
                "heads: choose another optim, such as adamw_torch_fused."
            )
        self._muon = Muon(groups[True], lr=lr, **settings)
        self._adamw = AdamW(groups[False] or [{"params": []}], lr=adamw_lr, betas=betas, eps=eps, fused=True)
        made = [*self._muon.param_groups, *(group for group in self._adamw.param_groups if group["params"])]
        super().__init__(made, {**self._adamw.defaults, BY_MUON: False})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step both; groups and states may have been loaded, or added to, since the last step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, by_muon in ((self._muon, True), (self._adamw, False)):
            part.param_groups = [group for group in self.param_groups if group[BY_MUON] is by_muon]
            part.state = self.state
            part.step()
        return loss
