# Fails: evaluation: KeyError: "metric_for_best_model='acc' means 'eval_acc', which is not found
# Seen: https://github.com/huggingface/transformers/pull/31450
from small import trainer

changes = {"load_best_model_at_end": True, "metric_for_best_model": "acc"}
trainer(changes=changes).train()
