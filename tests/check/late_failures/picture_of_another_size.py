# Fails: outlier rows, row 411 (the shortest pixel_values)
import torch
from small import arguments
from torch import nn
from transformers import Trainer


class Pictures(nn.Conv2d):
    def forward(self, pixel_values, labels):
        return {"loss": nn.functional.cross_entropy(super().forward(pixel_values).mean(dim=(2, 3)), labels)}


rows = [{"pixel_values": torch.randn(3, 8, 8), "labels": number % 4} for number in range(600)]
rows[411]["pixel_values"] = torch.randn(1, 8, 8)
Trainer(Pictures(3, 4, 3), arguments(eval_strategy="no"), train_dataset=rows).train()
