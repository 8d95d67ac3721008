from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from littrainer import TrainerDataModule, TransformersModule, set_seed
from tests.lightning_users.fitting import FitRecorder, fit_module, loader, make_module, make_trainer, record_fit
from tests.scenarios.data import vector_rows
from tests.scenarios.models import CountingClassifier, KeywordClassifier
from tests.scenarios.trainers import warnings_logged

SGD = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0}


def test_a_loss_that_ignores_the_number_of_items_is_summed_as_in_a_trainer() -> None:
    rows, model = vector_rows(6), KeywordClassifier()
    module = make_module(copy.deepcopy(model), SGD)
    with warnings_logged("loss_normalization='exact'") as texts:
        recorder = record_fit(make_module(model, SGD), loader(rows, 2), accumulate_grad_batches=2)
    assert len(texts) == 1 and "KeywordClassifier" in texts[0] and "2 times too large" in texts[0]
    with torch.no_grad():
        expected = sum(module(**batch)["loss"].item() for batch in loader(rows[:4], 2))
    assert recorder.losses[1] == pytest.approx(expected, rel=1e-6)


class Questions(KeywordClassifier):
    """A model whose labels have another name."""

    def forward(self, x: torch.Tensor, start_positions: Any = None, **kwargs: Any) -> Any:
        return super().forward(x, start_positions)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize(("make", "label"), [(KeywordClassifier, "labels"), (Questions, "start_positions")])
def test_an_exact_loss_does_not_depend_on_the_layout(make: Any, label: str, is_shared: bool) -> None:
    exact = {**SGD, "loss_normalization": "exact", "label_names": [label]}
    rows = [{"x": row["x"], label: row["labels"]} for row in vector_rows(10)]

    def run(batch_size: int, accumulation: int) -> FitRecorder:
        settings = {"per_device_train_batch_size": batch_size, "train_sampling_strategy": "sequential"}
        data: Any = TrainerDataModule(rows, args=settings) if is_shared else loader(rows, batch_size)
        set_seed(0)
        return record_fit(make_module(make(), exact), data, accumulate_grad_batches=accumulation)

    expected = run(10, 1)
    # The last micro-batch is smaller.
    for batch_size, accumulation in ((4, 3), (3, 4), (1, 10)):
        recorder = run(batch_size, accumulation)
        torch.testing.assert_close(recorder.gradients, expected.gradients)
        assert recorder.losses[-1] == pytest.approx(expected.losses[-1], rel=1e-6)


def test_a_window_without_labels_has_zero_gradients() -> None:
    rows = vector_rows(12)
    for row in rows[4:8]:
        row["labels"] = -100
    recorder = record_fit(make_module(CountingClassifier(), SGD), loader(rows, 2), accumulate_grad_batches=2)
    assert [bool(gradient.isfinite().all()) for gradient in recorder.gradients] == [True] * 3
    assert [bool(gradient.any()) for gradient in recorder.gradients] == [True, False, True]


def test_the_loss_of_an_overridden_training_step_is_divided_by_lightning() -> None:
    class PlainStep(TransformersModule):
        def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
            return self(**batch)["loss"]

    recorder = record_fit(PlainStep(make_module().model, SGD), loader(vector_rows(8), 2), accumulate_grad_batches=4)
    expected = record_fit(make_module(args=SGD), loader(vector_rows(8), 8))
    torch.testing.assert_close(recorder.gradients[0], expected.gradients[0])


@pytest.mark.parametrize("length", [None, 6])
def test_only_the_micro_batches_of_a_window_are_read_before_its_first_forward_pass(length: int | None) -> None:
    events: list[str] = []

    class Batches:
        def __iter__(self) -> Any:
            for number, batch in enumerate(loader(vector_rows(12), 2)):
                events.append(f"read {number}")
                yield batch

    class Sized(Batches):
        def __len__(self) -> int:
            return 6

    class RecordingClassifier(CountingClassifier):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            events.append("forward")
            return super().forward(*args, **kwargs)

    recorder = record_fit(
        make_module(RecordingClassifier(), SGD), Batches() if length is None else Sized(), accumulate_grad_batches=4
    )
    assert len(recorder.gradients) == 2
    assert [event for event in events if event != "forward"] == [f"read {number}" for number in range(6)]
    assert events.index("forward") == 4


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_regularizer_in_the_loss_keeps_its_weight(is_shared: bool) -> None:
    class WithRegulariser(TransformersModule):
        def compute_loss(self, inputs: dict[str, Any], num_items_in_window: Any = None) -> Any:
            loss, outputs = super().compute_loss(inputs, num_items_in_window)
            return loss + self.model.head.weight.square().sum(), outputs

    rows = vector_rows(8)
    for row in rows[:3]:
        row["labels"] = -100
    data = TrainerDataModule(rows, args={"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential"})
    set_seed(0)
    module = WithRegulariser(CountingClassifier(), SGD)
    recorder = record_fit(module, data if is_shared else loader(rows, 2), accumulate_grad_batches=4)
    set_seed(0)
    model = CountingClassifier()
    batch = next(iter(loader(rows, 8)))
    (model(**batch, num_items_in_batch=5)["loss"] + 4 * model.head.weight.square().sum()).backward()
    torch.testing.assert_close(
        recorder.gradients[0], torch.cat([weight.grad.flatten() for weight in model.parameters()])
    )


def test_the_rest_of_a_window_after_a_resume_is_a_window(tmp_path: Path) -> None:
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 2:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    unchanged, rows = {**SGD, "learning_rate": 0.0}, vector_rows(8)
    fit_module(make_module(args=unchanged), loader(rows, 2), accumulate_grad_batches=4, callbacks=[Saves()])
    recorder = FitRecorder()
    trainer = make_trainer(accumulate_grad_batches=4, callbacks=[recorder])
    trainer.fit(make_module(args=unchanged), loader(rows, 2), ckpt_path=tmp_path / "saved.ckpt")
    # Lightning reads a plain loader from the beginning.
    expected = record_fit(make_module(args=unchanged), loader(rows[:4], 4))
    torch.testing.assert_close(recorder.gradients[0], expected.gradients[0])
