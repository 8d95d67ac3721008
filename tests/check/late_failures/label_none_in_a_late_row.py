# Fails: evaluation: RuntimeError: Could not infer dtype of NoneType
from small import texts, trainer

rows = texts(400, 1)
rows[313]["labels"] = None
trainer(eval_dataset=rows).train()
