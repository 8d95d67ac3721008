# Fails: evaluation: KeyError: "The learning rate follows metric_for_best_model, 'eval_f1'
# Seen: https://github.com/huggingface/transformers/pull/23952
from small import trainer

changes = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "f1"}
trainer(changes=changes).train()
