# Fails: end of training: RuntimeError: The weights in
# Seen: https://github.com/huggingface/transformers/issues/14628
import torch
from small import Reader, trainer


class WithMemory(Reader):
    """Model with a buffer that grows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.zeros(0))

    def forward(self, input_ids, labels=None):
        if self.training:
            self.memory = torch.cat([self.memory, input_ids[:, 0].float()])
        return super().forward(input_ids, labels)


trainer(model=WithMemory(), changes={"load_best_model_at_end": True}).train()
