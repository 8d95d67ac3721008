# Fails: row 77
from small import texts, trainer

rows = texts(1000)
rows[77]["labels"] = "2"
trainer(train_dataset=rows).train()
