# Fails: row 645 (the greatest labels): IndexError: Target 3 is out of bounds
from small import CLASSES, texts, trainer

rows = texts(1000)
rows[645]["labels"] = CLASSES
trainer(train_dataset=rows).train()
