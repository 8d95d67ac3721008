# Fails: row 555 (x: 1-dimensional, real numbers, not all finite): FloatingPointError: the loss is nan
import torch
from small import arguments
from torch import nn
from transformers import Trainer


class Line(nn.Linear):
    def forward(self, x, labels):
        return {"loss": (super().forward(x).squeeze(-1) - labels).square().mean()}


rows = [{"x": torch.randn(3), "labels": torch.randn(())} for _ in range(1000)]
rows[555]["x"][1] = float("nan")
Trainer(Line(3, 1), arguments(eval_strategy="no"), train_dataset=rows).train()
