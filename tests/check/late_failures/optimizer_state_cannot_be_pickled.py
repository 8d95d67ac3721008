# Fails: save: AttributeError: Can't pickle local object 'Counting.step
import torch
from small import Reader, trainer


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["decay"] = lambda step: 0.9**step
        return super().step(closure)


model = Reader()
trainer(model=model, optimizers=(Counting(model.parameters(), lr=0.1), None)).train()
