# Fails: evaluation: ValueError: cannot reshape array of size 30 into shape (4)
import numpy as np
from small import trainer


def minimum_accuracy(prediction):
    hits = np.argmax(prediction.predictions, axis=-1) == prediction.label_ids
    return {"accuracy": float(hits.reshape(-1, 4).mean(axis=1).min())}


trainer(compute_metrics=minimum_accuracy).train()
