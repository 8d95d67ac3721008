# Fails: train_dataset: row 802: cannot be read: FileNotFoundError: data/00802.txt
from small import texts, trainer
from torch.utils.data import Dataset


class Files(Dataset):
    def __init__(self):
        self.rows = texts(1000)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if index == 802:
            raise FileNotFoundError("data/00802.txt")
        return self.rows[index]


trainer(train_dataset=Files()).train()
