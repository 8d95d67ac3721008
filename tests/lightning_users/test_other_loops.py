"""A TransformersModule in Fabric's loop and in a custom loop."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from littrainer import TransformersModule, set_seed
from tests.lightning_users.curves import get_weights
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, token_rows
from tests.scenarios.models import tiny_bert_classifier, tiny_llama

ARGUMENTS: dict[str, Any] = {"learning_rate": 0.01, "weight_decay": 0.1, "warmup_steps": 1}
BATCHES = 4


def loader() -> DataLoader[Any]:
    return DataLoader(Rows(token_rows(4 * BATCHES)), batch_size=4, collate_fn=pad_tokens)


@pytest.fixture
def expected_weights() -> Any:
    """Return the weights after a loop of torch with explicit groups and schedule."""
    set_seed(0)
    model = tiny_bert_classifier().train()
    decayed = [p for name, p in model.named_parameters() if not name.endswith("bias") and "LayerNorm" not in name]
    undecayed = [p for name, p in model.named_parameters() if name.endswith("bias") or "LayerNorm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: step if step < 1 else (BATCHES - step) / (BATCHES - 1)
    )
    for batch in loader():
        model(**batch)["loss"].backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return get_weights(model)


@pytest.mark.parametrize("in_fabric", [False, True])
@pytest.mark.parametrize("by_step", [False, True], ids=["forward", "training_step"])
def test_a_module_is_trained_like_its_model(expected_weights: Any, in_fabric: bool, by_step: bool) -> None:
    set_seed(0)
    trained: Any = TransformersModule(tiny_bert_classifier(), ARGUMENTS)
    trained.train()
    module, batches = trained, loader()
    optimizer, schedule = module.optimizer_and_schedule(BATCHES)
    fabric = Fabric(accelerator="cpu", devices=1)
    if in_fabric:
        trained, optimizer = fabric.setup(module, optimizer)
        batches = fabric.setup_dataloaders(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index, batch in enumerate(batches):
            loss = trained.training_step(batch, index) if by_step else trained(**batch)["loss"]
            fabric.backward(loss) if in_fabric else loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert get_weights(module.model) == expected_weights


def test_the_rank_is_known_without_a_lightning_trainer() -> None:
    module = TransformersModule(tiny_llama())
    assert module.rank == 0
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        assert module.rank == 1
    finally:
        torch.distributed.destroy_process_group()


def test_a_custom_loop_divides_by_the_label_tokens_of_its_window() -> None:
    batches = list(loader())[:2]
    module = TransformersModule(tiny_llama(), ARGUMENTS).eval()
    for batch in batches:
        batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
    number = module.items_in_window(batches)
    losses = [module.compute_loss(batch, number)[0] for batch in batches]
    means = [module(**batch)["loss"] for batch in batches]
    tokens = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    assert tokens[0] != tokens[1] and number == sum(tokens)
    mean = sum(mean * count for mean, count in zip(means, tokens, strict=True)) / sum(tokens)
    torch.testing.assert_close(sum(losses), mean)
