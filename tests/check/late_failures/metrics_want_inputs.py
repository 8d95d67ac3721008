# Fails: evaluation: TypeError: '>' not supported between instances of 'NoneType' and 'int'
from small import trainer


def by_length(prediction):
    return {"tokens": float((prediction.inputs > 0).sum())}


# include_for_metrics=["inputs"] is missing.
trainer(compute_metrics=by_length).train()
