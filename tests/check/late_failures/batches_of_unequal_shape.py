# Fails: evaluation: ValueError: setting an array element with a sequence
# Seen: https://github.com/huggingface/transformers/issues/37593
import numpy as np
from small import trainer


def scores(prediction):
    return {"accuracy": float((np.array(prediction.predictions).argmax(-1) == np.array(prediction.label_ids)).mean())}


trainer(compute_metrics=scores, changes={"eval_do_concat_batches": False}).train()
