# Fails: evaluation: TypeError
# Seen: https://github.com/huggingface/transformers/issues/39616
from small import accuracy, trainer


def per_class(prediction):
    return {**accuracy(prediction), "classes": set(prediction.label_ids.tolist())}


trainer(compute_metrics=per_class).train()
