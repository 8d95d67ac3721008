# Fails: evaluation: TypeError: compute_metrics (per_class) returned 'classes': {0, 1, 2} (a set)
# Seen: https://github.com/huggingface/transformers/issues/39616
from small import accuracy, trainer


def per_class(prediction):
    return {**accuracy(prediction), "classes": set(prediction.label_ids.tolist())}


trainer(compute_metrics=per_class).train()
