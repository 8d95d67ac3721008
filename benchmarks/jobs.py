"""Models and data that are trained and evaluated; the same weights and samples on every side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

Samples = list[dict[str, torch.Tensor]]


class MLP(nn.Module):
    """Linear layers with nothing between them but ReLU.

    Parameters:
        width: Of each layer.
        layers: Before the last one.
        inputs: Numbers of a sample.
    """

    def __init__(self, width: int = 32, layers: int = 1, inputs: int = 16) -> None:
        super().__init__()
        inner: list[nn.Module] = []
        for index in range(layers):
            inner += [nn.Linear(width if index else inputs, width), nn.ReLU()]
        self.layers = nn.Sequential(*inner, nn.Linear(width, 2))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def vectors(count: int, inputs: int = 16) -> Samples:
    return [{"inputs": torch.randn(inputs), "labels": torch.tensor(index % 2)} for index in range(count)]


def bert(width: int, layers: int = 2, vocabulary: int = 1000, heads: int = 4, inner: int | None = None) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner or 2 * width,
        max_position_embeddings=128,
    )
    return BertForSequenceClassification(config)


def gpt2(width: int, layers: int, vocabulary: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=2, n_positions=128)
    # The ids of its tokens, which default to the end of a vocabulary of 50257.
    config.bos_token_id = config.eos_token_id = 0
    return GPT2LMHeadModel(config)


def token_rows(count: int, length: int, vocabulary: int = 1000) -> Samples:
    return [
        {
            "input_ids": torch.randint(0, vocabulary, (length,)),
            "attention_mask": torch.ones(length, dtype=torch.long),
            "labels": torch.tensor(index % 2),
        }
        for index in range(count)
    ]


def texts(count: int, length: int, vocabulary: int) -> Samples:
    rows = torch.randint(0, vocabulary, (count, length))
    return [{"input_ids": row, "labels": row} for row in rows]


@dataclass(frozen=True)
class Job:
    """A model and its data.

    Parameters:
        title: What tables call it.
        build_model: Makes the model, the same weights after the same seed.
        build_samples: Makes that many samples.
        classifies: Whether an evaluation computes accuracy from logits; otherwise the loss is all.
    """

    title: str
    build_model: Callable[[], nn.Module]
    build_samples: Callable[[int], Samples]
    classifies: bool = True

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build_model()

    def samples(self, count: int) -> Samples:
        torch.manual_seed(1)
        return self.build_samples(count)


def square_job(title: str, width: int, layers: int) -> Job:
    """Square layers and nothing else, to have a certain number of parameters."""
    return Job(title, partial(MLP, width, layers, width), partial(vectors, inputs=width))


JOBS: dict[str, Job] = {
    "mlp": Job("MLP 16-32-2", MLP, vectors),
    "bert": Job("BERT, 2 layers of width 32, 16 tokens", partial(bert, 32), partial(token_rows, length=16)),
    "tiny-bert": Job(
        "BERT, 2 layers of width 128, 64 tokens",
        partial(bert, 128, vocabulary=30522, heads=2, inner=512),
        partial(token_rows, length=64),
    ),
    "tiny-gpt2": Job(
        "GPT-2, 2 layers of width 128, 64 tokens",
        partial(gpt2, 128, 2, 8192),
        partial(texts, length=64, vocabulary=8192),
        classifies=False,
    ),
    "memory-bert": Job(
        "BERT, 4 layers of width 256, 128 tokens", partial(bert, 256, 4), partial(token_rows, length=128)
    ),
    "mlp-2-layers": Job("MLP, 2 layers", partial(MLP, 32, 1), vectors),
    "mlp-8-layers": Job("MLP, 8 layers", partial(MLP, 32, 7), vectors),
    "mlp-32-layers": Job("MLP, 32 layers", partial(MLP, 32, 31), vectors),
    "bert-50m": Job(
        "BERT, 50 million parameters",
        partial(bert, 512, 12, 24_000, 8, 2048),
        partial(token_rows, length=16, vocabulary=24_000),
    ),
    "square-1m": square_job("MLP, 1 million parameters", 512, 4),
    "square-4m": square_job("MLP, 4 million parameters", 1024, 4),
    "square-17m": square_job("MLP, 17 million parameters", 2048, 4),
}


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def accuracy(prediction: Any) -> dict[str, float]:
    """For a Trainer's `compute_metrics`."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}
