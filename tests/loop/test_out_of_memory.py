from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from littrainer import Trainer
from littrainer.loop.out_of_memory import is_out_of_memory
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(OUT_OF_MEMORY), True),
        (torch.cuda.OutOfMemoryError("HIP out of memory. Tried"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError(OUT_OF_MEMORY, 3), False),
        (ValueError(OUT_OF_MEMORY), False),
        (RuntimeError(), False),
    ],
    ids=str,
)
def test_errors_that_say_memory_ran_out_are_known(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


class SmallMemory(VectorClassifier):
    """Holds `room` samples; in evaluation mode too where `also_in_evaluation`."""

    def __init__(self, room: int, also_in_evaluation: bool = False) -> None:
        super().__init__()
        self.room = room
        self.also_in_evaluation = also_in_evaluation
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if self.training or self.also_in_evaluation:
            self.sizes.append(len(x))
            if len(x) > self.room:
                raise RuntimeError(OUT_OF_MEMORY)
        return super().forward(x, labels)


def test_the_batch_size_shrinks_by_a_tenth_until_it_fits_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = SmallMemory(5)
    trainer = quiet_trainer(
        tmp_path, model, rows=20, auto_find_batch_size=True, per_device_train_batch_size=10, num_train_epochs=1
    )
    with caplog.at_level(logging.WARNING):
        assert trainer.train().global_step == 4
    assert model.sizes == [10, 9, 8, 7, 6, 5, 5, 5, 5]
    assert "10 samples; training starts over with 9" in caplog.text
    assert "found that micro-batches of 5 samples fit" in caplog.text
    assert trainer.state.train_batch_size == 5
    assert trainer.args.per_device_train_batch_size == 10


def test_another_error_is_not_retried(tmp_path: Path) -> None:
    class Broken(SmallMemory):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            self.sizes.append(len(x))
            raise RuntimeError("something else")

    model = Broken(0)
    with pytest.raises(RuntimeError, match="something else"):
        quiet_trainer(tmp_path, model, auto_find_batch_size=True).train()
    assert model.sizes == [4]


def test_when_not_even_one_sample_fits_the_error_says_what_to_do(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, SmallMemory(0), auto_find_batch_size=True)
    with pytest.raises(RuntimeError, match=r"auto_find_batch_size: .*one sample.*activation_checkpointing"):
        trainer.train()


def test_a_subclass_is_told_of_each_size_before_it_is_tried(tmp_path: Path) -> None:
    model = SmallMemory(8)

    class Told(Trainer):
        told: ClassVar[list[Any]] = []

        def _update_auto_batch_size(self, batch_size: int) -> None:
            self.told.append((batch_size, len(model.sizes)))
            super()._update_auto_batch_size(batch_size)

    trainer = quiet_trainer(
        tmp_path, model, rows=20, kind=Told, auto_find_batch_size=True, per_device_train_batch_size=10, max_steps=1
    )
    trainer.train()
    assert Told.told == [(10, 0), (9, 1), (8, 2)] and model.sizes == [10, 9, 8]
    assert trainer.model_wrapped is model


@pytest.mark.parametrize(("steps", "expected"), [(None, 0), (1, 6), (2, 4), (3, 2)])
def test_the_cache_is_emptied_in_every_so_many_optimizer_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int | None, expected: int
) -> None:
    calls: list[str] = []
    monkeypatch.setattr("littrainer.hooks.empty_device_cache", lambda: calls.append("emptied"))
    # Three optimizer steps of two micro-batches each.
    trainer = quiet_trainer(
        tmp_path, rows=24, max_steps=3, gradient_accumulation_steps=2, torch_empty_cache_steps=steps
    )
    trainer.train()
    assert len(calls) == expected


def test_each_size_that_is_tried_leaves_the_samples_of_an_optimizer_step_as_they_are(tmp_path: Path) -> None:
    model = SmallMemory(5)
    trainer = quiet_trainer(
        tmp_path,
        model,
        rows=24,
        auto_find_batch_size=True,
        per_device_train_batch_size=12,
        global_batch_size=12,
        num_train_epochs=1,
    )
    output = trainer.train()
    # Of the sizes that divide twelve.
    assert model.sizes == [12, 6, *[4] * 6]
    assert output.global_step == 2 and trainer.args.gradient_accumulation_steps == 3
