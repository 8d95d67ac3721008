# Fails: resume: the next loss is
import random

from small import trainer
from torch.utils.data import Sampler
from transformers import Trainer


class Shuffled(Sampler):
    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __iter__(self):
        return iter(random.SystemRandom().sample(range(self.number), self.number))


class RandomOrder(Trainer):
    def _get_train_sampler(self, dataset=None):
        return Shuffled(len(self.train_dataset))


trainer(kind=RandomOrder).train()
