"""`optim="muon"`: torch's Muon for the matrices within a model, AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from littrainer.model.facts import base_model

# Key of a parameter group: whether Muon steps it.
BY_MUON = "by_muon"
# Modules that make predictions of what a model has found out, if it does not have a `base_model` without them.
HEADS = re.compile(r"(?:^|[._])(?:heads?|classifier|score|predictions|output_projection)\d*(?:\.|$)")


def select_adamw_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return what AdamW steps in a model, by what it is; the rest are matrices, and Muon's."""
    inner = base_model(model)
    base: Any = getattr(inner, "base_model", inner)
    within = None if base is inner else set(map(id, base.parameters()))
    named = list(model.named_parameters())
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return {
        "embeddings": [one for table in tables for one in table.parameters()],
        "heads": [one for name, one in named if (HEADS.search(name) if within is None else id(one) not in within)],
        "what is no weight matrix": [one for name, one in named if one.dim() != 2 or not name.endswith("weight")],
    }


class MuonWithAdamW(Optimizer):
    """Muon and AdamW over the groups of one model; state dict, schedules and clipping see one optimizer.

    Parameters:
        params: parameter groups, each of which is split by what steps its parameters.
        by_adamw: the parameters that AdamW steps.
        lr: learning rate of Muon.
        adamw_lr: learning rate of AdamW.
        betas, eps: AdamW's.
        muon: further settings of Muon.

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
        **muon: Any,
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
        self._muon = Muon(groups[True], lr=lr, **muon)
        self._adamw = AdamW(groups[False] or [{"params": []}], lr=adamw_lr, betas=betas, eps=eps, fused=True)
        made = [*self._muon.param_groups, *(group for group in self._adamw.param_groups if group["params"])]
        super().__init__(made, {**self._adamw.defaults, BY_MUON: False})

    def step(self, closure: Any = None) -> Any:
        """Step both; groups and states may have been loaded, or added to, since the last step."""
        loss = None if closure is None else closure()
        for part, by_muon in ((self._muon, True), (self._adamw, False)):
            part.param_groups = [group for group in self.param_groups if group[BY_MUON] is by_muon]
            part.state = self.state
            part.step()
        return loss
