# Fails: optimizer step: ValueError: Expected more than 1 value per channel when training
# Seen: https://github.com/scverse/scvi-tools/issues/2314
from small import Reader, texts, trainer
from torch import nn


class Normed(Reader):
    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(8), self.head)


trainer(model=Normed(), train_dataset=texts(89)).train()
