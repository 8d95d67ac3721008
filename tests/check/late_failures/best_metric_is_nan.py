# Fails: save: no checkpoint was written after an evaluation: metric_for_best_model='f1' gives -inf
from small import trainer

changes = {"save_strategy": "best", "metric_for_best_model": "f1", "load_best_model_at_end": True}
trainer(changes=changes, compute_metrics=lambda prediction: {"f1": float("nan")}).train()
