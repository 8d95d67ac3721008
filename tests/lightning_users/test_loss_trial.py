from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from littrainer import TransformersModule
from littrainer.checkpoint.random_state import capture_random_states
from littrainer.lightning.loss_trial import Divided, part_divided
from tests.fidelity.compare import first_difference
from tests.lightning_users.fitting import fitted, loader
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import language_rows, vector_rows
from tests.scenarios.models import (
    CountingClassifier,
    KeywordClassifier,
    NoisyClassifier,
    VectorClassifier,
    tiny_bert_classifier,
    tiny_gpt2,
)

NUMBER = torch.tensor(5.0)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (CountingClassifier, Divided.WHOLLY),
        (KeywordClassifier, Divided.NOT_AT_ALL),
        (tiny_gpt2, Divided.WHOLLY),
        (tiny_bert_classifier, Divided.NOT_AT_ALL),
    ],
)
def test_whether_a_model_divides_by_the_number_is_found_by_trying(model: Any, expected: Divided) -> None:
    # Dropout draws the same in both forward passes.
    made = model().train()
    if isinstance(made, VectorClassifier):
        batch = next(iter(loader(vector_rows(4))))
    else:
        rows = language_rows(4)
        batch = pad_tokens(rows if expected is Divided.WHOLLY else [{**row, "labels": 1} for row in rows])
    assert part_divided(lambda number: made(**batch, num_items_in_batch=number)["loss"], made, NUMBER) is expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("divided", "undivided", "expected"),
    [
        (3.0, 0.0, Divided.WHOLLY),
        (-3.0, 0.0, Divided.WHOLLY),
        (0.0, 3.0, Divided.NOT_AT_ALL),
        (3.0, 0.01, Divided.PARTLY),
        (3.0, 2.0, Divided.PARTLY),
        (0.1, 3.0, Divided.PARTLY),
        (0.0, 0.0, Divided.UNKNOWN),
        (float("nan"), 0.0, Divided.UNKNOWN),
        (float("inf"), 0.0, Divided.UNKNOWN),
    ],
)
def test_a_part_of_a_loss_that_is_not_divided_is_seen(
    divided: float, undivided: float, expected: Divided, dtype: torch.dtype
) -> None:
    def loss_for(number: torch.Tensor) -> torch.Tensor:
        return torch.tensor(divided, dtype=dtype) / number.to(dtype) + torch.tensor(undivided, dtype=dtype)

    assert part_divided(loss_for, nn.Module(), NUMBER) is expected
    assert part_divided(loss_for, nn.Module(), NUMBER, has_labels=False) is Divided.UNKNOWN


def test_trying_leaves_modes_buffers_and_random_numbers_as_they_were() -> None:
    class Drawing(NoisyClassifier):
        def forward(self, x: Any, labels: Any = None, **kwargs: Any) -> Any:
            random.random()
            np.random.rand()
            return super().forward(x, labels)

    model = Drawing()
    model.norm.eval()
    modes = [part.training for part in model.modules()]
    batch = next(iter(loader(vector_rows(4))))
    before, states = {name: value.clone() for name, value in model.state_dict().items()}, capture_random_states()
    assert part_divided(lambda number: model(**batch)["loss"], model, NUMBER) is Divided.NOT_AT_ALL
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert first_difference(capture_random_states(), states) is None


def test_a_buffer_that_a_forward_pass_replaces_stays_replaced() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(1))

        def forward(self) -> torch.Tensor:
            self.register_buffer("table", torch.ones(2))
            return torch.ones(())

    model = Growing()
    part_divided(lambda number: model(), model, NUMBER)
    assert model.table.tolist() == [1, 1]


class Logging(TransformersModule):
    """Logs in compute_loss."""

    def compute_loss(self, inputs: dict[str, Any], num_items_in_window: Any = None) -> tuple[torch.Tensor, Any]:
        value, outputs = super().compute_loss(inputs, num_items_in_window)
        self.log_dict({"calls": 1.0}, on_step=False, on_epoch=True, reduce_fx="sum", batch_size=1)
        return value, outputs


def test_trying_logs_nothing() -> None:
    module = Logging(CountingClassifier(), {"optim": "sgd"})
    trainer = fitted(module, loader(vector_rows(8), 2), accumulate_grad_batches=2)
    assert trainer.callback_metrics["calls"] == 4 and "log" not in vars(module)


def test_a_model_with_a_loss_in_training_only_can_be_tried() -> None:
    class Detector(CountingClassifier):
        def forward(self, x: torch.Tensor, labels: Any = None, **kwargs: Any) -> Any:
            outputs = super().forward(x, labels, **kwargs)
            return outputs if self.training else {"logits": outputs["logits"]}

    trainer = fitted(TransformersModule(Detector()), loader(vector_rows(8), 2), accumulate_grad_batches=2)
    assert trainer.global_step == 2
