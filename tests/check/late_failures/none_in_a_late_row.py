# Fails: row 512 (input_ids: None): TypeError: object of type 'NoneType' has no len()
from small import texts, trainer

rows = texts(1000)
rows[512]["input_ids"] = None
trainer(train_dataset=rows).train()
