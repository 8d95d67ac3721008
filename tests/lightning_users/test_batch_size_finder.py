"""`trainer.scale_batch_size()` with a simulated limit of memory."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from littrainer import Trainer, default_data_collator
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer


class LimitedModel(VectorClassifier):
    """A model with memory for some samples, which records its batch sizes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        # An array, since lists and deques are restored.
        self.sizes = array("l")

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.sizes.append(len(x))
        if len(x) > self.limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate more than there is.")
        return super().forward(x, labels)

    @property
    def tried(self) -> list[int]:
        return list(dict.fromkeys(self.sizes))


@pytest.mark.parametrize(
    ("kind", "keywords", "size", "tried"),
    [
        (StepwiseTrainer, {}, 8, [2, 4, 8, 16]),
        (Trainer, {"mode": "binsearch", "margin": 0.2}, 8, [2, 4, 8, 16, 12, 10, 11]),
        (Trainer, {"init_val": 40}, 10, [40, 20, 10]),
        (Trainer, {"init_val": 40, "mode": "binsearch", "margin": 0.0}, 11, [40, 20, 10, 15, 12, 11]),
        (Trainer, {"max_val": 5}, 5, [2, 4, 5]),
        (Trainer, {"max_trials": 2}, 4, [2, 4]),
    ],
)
def test_the_largest_size_that_fits_is_found(
    tmp_path: Path, kind: type[Trainer], keywords: dict[str, Any], size: int, tried: list[int]
) -> None:
    model = LimitedModel(11)
    trainer = quiet_trainer(tmp_path, model, rows=480, kind=kind)
    assert trainer.scale_batch_size(**keywords) == size and model.tried == tried
    # Three optimizer steps with each size.
    assert all(model.sizes.count(candidate) == 3 for candidate in tried if candidate <= 11)
    assert trainer._train_batch_size == 4 and not trainer.args.auto_find_batch_size


def test_the_size_is_limited_by_the_number_of_samples(tmp_path: Path) -> None:
    model = LimitedModel(1000)
    assert quiet_trainer(tmp_path, model, rows=13).scale_batch_size() == 13
    assert max(model.sizes) == 13
    options = {"train_dataset": Stream(vector_rows(40))}
    assert quiet_trainer(tmp_path, LimitedModel(20), trainer_kwargs=options, max_steps=1).scale_batch_size() == 16


def test_accumulated_gradients_need_memory(tmp_path: Path) -> None:
    model = LimitedModel(7)
    trainer = quiet_trainer(tmp_path, model, rows=100, gradient_accumulation_steps=5)
    assert trainer.scale_batch_size(steps_per_trial=1) == 4
    assert model.sizes.count(4) == 2 and trainer.args.gradient_accumulation_steps == 5


def test_no_size_that_fits_is_an_error_with_advice(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, LimitedModel(0))
    with pytest.raises(RuntimeError, match=r"micro-batches of 1 samples too, .* Use a smaller model"):
        trainer.scale_batch_size(init_val=8)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loader_that_ignores_the_size_is_refused(tmp_path: Path, accumulation: int) -> None:
    class FixedSizeTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            batches = BatchSampler(range(12), 3, drop_last=False)
            return DataLoader(Rows(vector_rows(12)), batch_sampler=batches, collate_fn=default_data_collator)

    with pytest.raises(ValueError, match=r"asked for micro-batches of 2 samples, and .* made some of 3: let it read"):
        quiet_trainer(tmp_path, kind=FixedSizeTrainer, gradient_accumulation_steps=accumulation).scale_batch_size()


def test_fast_dev_run_does_not_change_the_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = LimitedModel(100)
    assert quiet_trainer(tmp_path, model, lightning={"fast_dev_run": True}).scale_batch_size() == 4
    assert not model.sizes and "keeps 4" in caplog.text
