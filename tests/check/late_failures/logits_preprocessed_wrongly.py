# Fails: evaluation: TypeError: <lambda>() takes 1 positional argument but 2 were given
from small import trainer

# It is called with the labels too.
trainer(preprocess_logits_for_metrics=lambda logits: logits.argmax(dim=-1)).train()
