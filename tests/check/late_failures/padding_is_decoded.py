# Fails: evaluation: IndexError: index -100 is out of bounds for axis 0 with size 40
# Seen: https://github.com/huggingface/transformers/issues/22634
import numpy as np
from small import TOKENS, Reader, trainer

VOCABULARY = np.array([f"token{number}" for number in range(TOKENS)])


class Tagger(Reader):
    """Model with a prediction for each position, so that batches have predictions of unequal lengths."""

    def forward(self, input_ids, labels=None):
        return {"loss": super().forward(input_ids, labels)["loss"], "logits": input_ids.clone()}


def count_texts(prediction):
    return {"texts": len({" ".join(VOCABULARY[row]) for row in prediction.predictions})}


trainer(model=Tagger(), compute_metrics=count_texts).train()
