# Fails: evaluation: KeyError: 'input_ids'
from small import texts, trainer

mail = [{"tokens": row["input_ids"], "labels": row["labels"]} for row in texts(20, 2)]
trainer(eval_dataset={"news": texts(20, 1), "mail": mail}).train()
