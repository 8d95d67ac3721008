# Fails: row 512
from small import texts, trainer

rows = texts(1000)
rows[512]["input_ids"] = None
trainer(train_dataset=rows).train()
