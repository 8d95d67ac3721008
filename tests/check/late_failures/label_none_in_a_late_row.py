# Fails: evaluation:
from small import texts, trainer

rows = texts(400, 1)
rows[313]["labels"] = None
trainer(eval_dataset=rows).train()
