# Fails: rows that stand out, row 77 (labels: str): ValueError: too many dimensions 'str'
from small import texts, trainer

rows = texts(1000)
rows[77]["labels"] = "2"
trainer(train_dataset=rows).train()
