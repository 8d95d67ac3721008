# Fails: longest batch, row 333 (the longest input_ids): IndexError
from small import texts, trainer

rows = texts(1000)
rows[333]["input_ids"] *= 10
trainer(train_dataset=rows).train()
