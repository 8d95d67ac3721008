from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from littrainer.training.neftune import noisy_embeddings
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.words


def test_the_noise_is_uniform_within_alpha_over_the_root_of_a_rows_length() -> None:
    model, alpha = Embedder(), 6.0
    clean = model.words(IDS)
    bound = alpha / (3 * 4) ** 0.5
    with noisy_embeddings(model, alpha):
        noise = torch.stack([model.words(IDS) - clean for _ in range(500)])
    assert noise.abs().max() <= bound + 1e-6
    assert noise.abs().max() > 0.95 * bound
    assert noise.mean().abs() < 0.05 * bound


def test_there_is_no_noise_in_evaluation_mode_nor_after_the_block() -> None:
    model = Embedder()
    clean = model.words(IDS)
    with noisy_embeddings(model, 6.0):
        model.eval()
        assert torch.equal(model.words(IDS), clean)
        model.train()
        assert not torch.equal(model.words(IDS), clean)
    assert torch.equal(model.words(IDS), clean)
    assert not hasattr(model.words, "neftune_noise_alpha")


def test_an_error_in_the_block_leaves_no_noise_behind() -> None:
    model = Embedder()
    with pytest.raises(KeyError), noisy_embeddings(model, 6.0):
        raise KeyError
    assert not model.words._forward_hooks


def test_unset_alpha_asks_nothing_of_the_model() -> None:
    with noisy_embeddings(VectorClassifier(), None):
        pass


def test_a_model_that_does_not_name_its_embeddings_is_refused_before_training(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, neftune_noise_alpha=5.0)
    with pytest.raises(ValueError, match=r"neftune_noise_alpha=5\.0.*VectorClassifier.*get_input_embeddings"):
        trainer.train()
    assert trainer.state.global_step == 0
