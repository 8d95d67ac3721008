# Fails: resume: the next loss is
import torch
from small import Reader, trainer


class Warmed(Reader):
    """Model whose loss is scaled by a count that is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self, input_ids, labels=None):
        self.steps += self.training
        outputs = super().forward(input_ids, labels)
        return {**outputs, "loss": outputs["loss"] * (1 + self.steps / 10)}


trainer(model=Warmed()).train()
