# Fails: resume: the next loss is
import torch
from small import Reader, trainer


class Warmed(Reader):
    """The loss is scaled by a count that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self, input_ids, labels=None):
        self.steps += self.training
        found = super().forward(input_ids, labels)
        return {**found, "loss": found["loss"] * (1 + self.steps / 10)}


trainer(model=Warmed()).train()
