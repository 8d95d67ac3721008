"""Model, rows and arguments for scripts that fail late; a line or two makes each of them fail."""

import random
import tempfile

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

CLASSES, TOKENS, POSITIONS = 3, 40, 24


class Reader(nn.Module):
    """Classifies a text by the mean of its tokens and positions."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, 8), nn.Embedding(POSITIONS, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, input_ids, labels=None):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        logits = self.head((self.tokens(input_ids) + self.positions(positions)).mean(dim=1))
        return {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)} | {"logits": logits}


def texts(number=90, seed=0, longest=12):
    draw = random.Random(seed)
    lengths = [draw.randint(4, longest) for _ in range(number)]
    return [
        {"input_ids": [draw.randrange(1, TOKENS) for _ in range(length)], "labels": draw.randrange(CLASSES)}
        for length in lengths
    ]


def pad(rows):
    """Collate rows, with zeros after short texts."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    batch = {"input_ids": torch.tensor(ids)}
    if "labels" in rows[0]:
        batch["labels"] = torch.tensor([row["labels"] for row in rows])
    return batch


def accuracy(prediction):
    return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}


def arguments(kind=TrainingArguments, **changes):
    defaults = {
        "output_dir": tempfile.mkdtemp() + "/run",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 3,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "logging_steps": 5,
        "report_to": "none",
        "use_cpu": True,
    }
    return kind(**{**defaults, **changes})


def trainer(kind=Trainer, model=None, changes=None, **overrides):
    """Return a Trainer of 90 texts, evaluated on 30; `changes` are arguments."""
    defaults = {"train_dataset": texts(), "eval_dataset": texts(30, 1), "data_collator": pad}
    defaults["compute_metrics"] = accuracy
    return kind(model=model or Reader(), args=arguments(**(changes or {})), **{**defaults, **overrides})
