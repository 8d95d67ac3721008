"""A TransformersModule outside of a `lightning.Trainer`: in a loop of Fabric's, and in one of the user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from littrainer import set_seed
from tests.plain_lightning.curves import weights_of
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, token_rows
from tests.scenarios.models import tiny_bert_classifier

ARGUMENTS: dict[str, Any] = {"learning_rate": 0.01, "weight_decay": 0.1, "warmup_steps": 1}
BATCHES = 4


def loader() -> DataLoader[Any]:
    return DataLoader(Rows(token_rows(4 * BATCHES)), batch_size=4, collate_fn=pad_tokens)


@pytest.fixture
def by_hand() -> Any:
    """Weights after a loop of torch alone, with the decay groups and the schedule written out."""
    set_seed(0)
    model = tiny_bert_classifier().train()
    decayed = [p for name, p in model.named_parameters() if not name.endswith("bias") and "LayerNorm" not in name]
    others = [p for name, p in model.named_parameters() if name.endswith("bias") or "LayerNorm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: step if step < 1 else (BATCHES - step) / (BATCHES - 1)
    )
    for batch in loader():
        model(**batch)["loss"].backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return weights_of(model)
