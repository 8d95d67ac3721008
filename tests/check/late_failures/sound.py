# Fails: nothing; the others are one step away from this.
from small import trainer

trainer(changes={"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}).train()
