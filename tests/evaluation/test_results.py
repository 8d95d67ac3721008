from __future__ import annotations

import json
import time
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from transformers import trainer_utils as theirs

from littrainer.evaluation import results as ours


@pytest.mark.parametrize("extras", [{}, {"losses": "losses"}, {"inputs": "inputs", "losses": "losses"}], ids=len)
def test_a_prediction_unpacks_and_indexes_as_in_transformers(extras: dict[str, Any]) -> None:
    prediction = ours.EvalPrediction("predictions", "labels", **extras)
    expected = tuple(theirs.EvalPrediction("predictions", "labels", **extras))
    assert (*prediction,) == (*(prediction[index] for index in range(len(expected))),) == expected
    with pytest.raises(IndexError, match="elements, there is no element -1"):
        prediction[-1]


@pytest.mark.parametrize("amounts", [{"num_samples": 10, "num_steps": 3, "num_tokens": 700}, {"num_steps": 0}])
# The last is of a clock that was set back.
@pytest.mark.parametrize("seconds", [0.0, 1.23456789, -1.0])
def test_speeds_have_the_names_and_digits_of_transformers(
    monkeypatch: pytest.MonkeyPatch, amounts: dict[str, float], seconds: float
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0 + seconds)
    expected = theirs.speed_metrics("eval", 1000.0, **amounts)
    assert ours.speed_metrics("eval", 1000.0, **amounts) == expected


def test_metrics_are_converted_to_numbers_for_json() -> None:
    metrics = {
        "array number": np.float32(0.5),
        "whole": np.int64(3),
        "truth": np.bool_(True),
        "tensor": torch.tensor([2.5]),
        "nested": [OrderedDict(a=torch.tensor(1)), (np.float64(0.25),)],
        "text": "kept",
        "none": None,
    }
    plain = ours.denumpify_detensorize(metrics)
    assert plain == theirs.denumpify_detensorize(metrics)
    assert type(plain["nested"][0]) is OrderedDict and type(plain["nested"][1]) is tuple
    assert json.loads(json.dumps(plain))["tensor"] == 2.5


def test_outputs_have_the_fields_of_transformers_in_its_order() -> None:
    for name in ("TrainOutput", "EvalLoopOutput", "PredictionOutput"):
        assert getattr(ours, name)._fields == getattr(theirs, name)._fields
