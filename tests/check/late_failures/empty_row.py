# Fails: outlier rows, row 640 (input_ids: list, empty): IndexError
from small import Reader, texts, trainer


class FirstToken(Reader):
    def forward(self, input_ids, labels=None):
        assert input_ids[:, 0].all(), "a text begins with padding"
        return super().forward(input_ids, labels)


rows = texts(1000)
rows[640]["input_ids"] = []
trainer(model=FirstToken(), train_dataset=rows).train()
