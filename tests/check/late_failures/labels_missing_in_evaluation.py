# Fails: evaluation: KeyError: "metric_for_best_model='loss' means 'eval_loss', which is not found
# Seen: https://github.com/urchade/GLiNER/issues/140
from small import texts, trainer

rows = [{"input_ids": row["input_ids"]} for row in texts(30, 1)]
trainer(changes={"load_best_model_at_end": True}, eval_dataset=rows).train()
