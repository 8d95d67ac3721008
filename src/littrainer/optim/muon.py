"""`optim="muon"`: torch's Muon for inner matrices, and AdamW for all other parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from littrainer.model.facts import base_model

BY_MUON = "by_muon"
# Heads of models without a `base_model`.
HEADS = re.compile(r"(?:^|[._])(?:heads?|classifier|score|predictions|output_projection)\d*(?:\.|$)")


def select_adamw_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters that AdamW steps, by kind."""
    inner = base_model(model)
    base: Any = getattr(inner, "base_model", inner)
    base_ids = None if base is inner else set(map(id, base.parameters()))
    params = list(model.named_parameters())
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return {
        "embeddings": [param for table in tables for param in table.parameters()],
        "heads": [
            param for name, param in params if (HEADS.search(name) if base_ids is None else id(param) not in base_ids)
        ],
        "non-matrices": [param for name, param in params if param.dim() != 2 or not name.endswith("weight")],
    }


class MuonWithAdamW(Optimizer):
    """Muon and AdamW with the interface of a single optimizer.

    Parameters:
        params: parameter groups; each is split into Muon's and AdamW's parameters.
        by_adamw: the parameters that AdamW steps.
        betas, eps: AdamW's.
        muon: further settings of Muon.

    Raises:
        ValueError: there is no parameter for Muon.
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
        adamw_ids = set(map(id, by_adamw))
        groups: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in params:
            for by_muon, members in groups.items():
                selected = [param for param in group["params"] if (id(param) not in adamw_ids) is by_muon]
                if selected:
                    members.append({**group, "params": selected, BY_MUON: by_muon})
        if not groups[True]:
            raise ValueError(
                "optim='muon' steps matrices within the model, and found none that are trained except embeddings and "
                "heads: choose another optim, such as adamw_torch_fused."
            )
        self._muon = Muon(groups[True], lr=lr, **muon)
        self._adamw = AdamW(groups[False] or [{"params": []}], lr=adamw_lr, betas=betas, eps=eps, fused=True)
        combined = [*self._muon.param_groups, *(group for group in self._adamw.param_groups if group["params"])]
        super().__init__(combined, {**self._adamw.defaults, BY_MUON: False})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for optimizer, by_muon in ((self._muon, True), (self._adamw, False)):
            # Groups and states may have been loaded or added.
            optimizer.param_groups = [group for group in self.param_groups if group[BY_MUON] is by_muon]
            optimizer.state = self.state
            optimizer.step()
        return loss
