from __future__ import annotations

from collections import UserDict
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, SequentialSampler
from transformers import BatchEncoding

from littrainer import TrainerDataModule, TrainingArguments, TransformersModule
from tests.lightning_users.reading import (
    ARGUMENTS,
    CountingModule,
    Numbers,
    PlainModule,
    RecordingModel,
    SaveOnce,
    StreamOfNumbers,
    collate,
    collate_with_noise,
    fit,
    lightning,
    numbers_module,
)
from tests.scenarios.trainers import quiet_trainer

ROWS = 22


def record_trainer(folder: Path, rows: Any, **arguments: Any) -> list[Any]:
    options = {"train_dataset": rows, "eval_dataset": rows, "data_collator": collate_with_noise}
    changes = {"num_train_epochs": 3, "seed": 5, **ARGUMENTS, **arguments}
    trainer = quiet_trainer(folder, RecordingModel(), trainer_kwargs=options, **changes)
    trainer.train()
    return trainer.model.records


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"train_sampling_strategy": "sequential"},
        {"accelerator_config": {"use_seedable_sampler": False}},
        {"dataloader_drop_last": True, "data_seed": 3},
        {"train_sampling_strategy": "group_by_length", "remove_unused_columns": False},
    ],
)
def test_a_module_gets_the_batches_and_random_draws_of_a_trainer(tmp_path: Path, arguments: Any) -> None:
    rows = [{"x": float(index), "input_ids": [0] * (index % 5 + 1)} for index in range(ROWS)]
    ours = record_trainer(tmp_path, rows, gradient_accumulation_steps=2, eval_strategy="epoch", **arguments)
    data = numbers_module(rows, collate_with_noise, rows, **arguments)
    assert fit(CountingModule(), data, accumulate_grad_batches=2).records == ours


def test_a_stream_is_read_as_in_a_trainer(tmp_path: Path) -> None:
    ours = record_trainer(tmp_path, StreamOfNumbers(ROWS), gradient_accumulation_steps=2, max_steps=3)
    data = numbers_module(StreamOfNumbers(ROWS), collate_with_noise)
    assert fit(CountingModule(), data, accumulate_grad_batches=2, max_epochs=-1, max_steps=3).records == ours


@pytest.mark.parametrize(
    ("kind", "windows", "expected"), [(PlainModule, None, 0), (CountingModule, None, 6), (CountingModule, False, 0)]
)
def test_modules_that_count_items_get_windows_unless_disabled(kind: Any, windows: Any, expected: int) -> None:
    module = kind()
    data = numbers_module(Numbers(ROWS))
    data.windows = windows
    fit(module, data, max_epochs=1, accumulate_grad_batches=4)
    assert len(module.windows) == expected
    assert [batch.num_items_in_window for batch in module.windows] == [16, 16, 16, 16, 6, 6][:expected]


@pytest.mark.parametrize("kind", [dict, UserDict, BatchEncoding])
def test_hooks_and_callbacks_get_the_batch_of_the_collator(tmp_path: Path, kind: Any) -> None:
    class SteppingModule(TransformersModule):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            assert type(batch) is kind
            batch["x"] = batch["x"] * 2
            return batch

        def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
            sizes.append(len(batch["x"]))
            return self.model(**batch)["loss"]

    sizes: list[int] = []
    monitor = pl.callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch["x"]))
    data = numbers_module(Numbers(6), lambda rows: kind(collate(rows)), train_sampling_strategy="sequential")
    trainer = lightning(max_epochs=1, callbacks=[monitor], accumulate_grad_batches=2, logger=CSVLogger(tmp_path))
    module = SteppingModule(RecordingModel())
    trainer.fit(module, datamodule=data)
    assert sizes == [4, 2]
    assert module.model.numbers == [[0.0, 2.0, 4.0, 6.0], [8.0, 10.0]]


class Writer(pl.callbacks.BasePredictionWriter):
    """A callback that records the samples of each batch and of the epoch."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batch_indices: list[Any] = []

    def write_on_batch_end(self, trainer: pl.Trainer, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
        self.batch_indices.append(indices)

    def write_on_epoch_end(self, trainer: pl.Trainer, module: Any, predictions: Any, indices: Any) -> None:
        self.epoch_indices = indices


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
        {"train_sampling_strategy": "group_by_length", "remove_unused_columns": False},
    ],
)
def test_a_prediction_writer_gets_the_samples_of_each_batch(arguments: Any) -> None:
    lengths = [3, 1, 2, 5, 4]
    rows = [{"x": float(index), "input_ids": [0] * length} for index, length in enumerate(lengths)]
    data, writer = numbers_module(None, **arguments), Writer()
    data.predict_dataset = {"some": rows, "stream": StreamOfNumbers(2), "few": rows[:1]}
    trainer = lightning(callbacks=[writer])
    for should_return in (True, False):
        writer.batch_indices = []
        predictions: Any = trainer.predict(PlainModule(), datamodule=data, return_predictions=should_return)
        some, stream, few = writer.epoch_indices
        assert sorted(chain(*some)) == [0, 1, 2, 3, 4] and few == [[0]] and stream == []
        assert writer.batch_indices[: len(some)] == some and writer.batch_indices[-1] == [0]
        assert not should_return or predictions[0] == [[float(index) for index in batch] for batch in some]
        assert (some == [[0, 1], [2, 3], [4]]) is (arguments.get("train_sampling_strategy") is None)


def test_datasets_in_a_dict_are_evaluated_by_name() -> None:
    module = PlainModule()
    data = TrainerDataModule(
        Numbers(4), {"odd": Numbers(3), "even": Numbers(2)}, Numbers(5), dict(ARGUMENTS), data_collator=collate
    )
    trainer = lightning(max_epochs=1)
    trainer.fit(module, datamodule=data)
    assert module.evaluated == [(0, [0.0, 1.0]), (0, [2.0]), (1, [0.0, 1.0])]
    assert list(trainer.val_dataloaders) == ["odd", "even"]
    module.evaluated = []
    trainer.test(module, datamodule=data, verbose=False)
    assert module.evaluated == [(0, [0.0, 1.0]), (0, [2.0, 3.0]), (0, [4.0])]
    assert trainer.predict(module, datamodule=data) == [[0.0, 1.0], [2.0, 3.0], [4.0]]
    data.predict_dataset = Numbers(1)
    assert trainer.predict(module, datamodule=data) == [[0.0]]


def test_evaluations_keep_the_order_of_samples_grouped_by_length() -> None:
    module = PlainModule()
    rows = [{"x": float(index), "input_ids": [0] * (index % 5 + 1)} for index in range(9)]
    grouped = {"train_sampling_strategy": "group_by_length", "remove_unused_columns": False}
    fit(module, numbers_module(rows, collate, rows, **grouped), max_epochs=2)
    half = len(module.evaluated) // 2
    assert module.evaluated[:half] == module.evaluated[half:] != sorted(module.evaluated[:half])


def test_arguments_collator_and_model_default_to_the_modules() -> None:
    module: Any = PlainModule()
    module.args = TrainingArguments(per_device_train_batch_size=11, use_cpu=True)
    module.data_collator = lambda rows: {**collate(rows), **({"x": torch.zeros(1)} if "unused" in rows[0] else {})}
    assert [len(numbers) for numbers in fit(module, TrainerDataModule(Numbers(ROWS)), max_epochs=1).numbers] == [11, 11]
    assert module.model.numbers[0] != [0.0]


def test_unused_columns_are_dropped_unless_disabled(caplog: pytest.LogCaptureFixture) -> None:
    def names(rows: list[Any]) -> dict[str, Any]:
        return {"x": torch.tensor([float(len(row)) for row in rows])}

    assert fit(PlainModule(), numbers_module(Numbers(2), names), max_epochs=1).numbers == [[1.0, 1.0]]
    data = numbers_module(Numbers(2), names, remove_unused_columns=False)
    assert fit(PlainModule(), data, max_epochs=1).numbers == [[2.0, 2.0]]

    class Modelless(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.listener = self.model
            del self.model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.listener(**batch)["loss"]

    keeping_x = {"signature_columns": ["x"]}
    for columns, model, changes in ((2.0, None, {}), (1.0, RecordingModel(), {}), (1.0, None, keeping_x)):
        module, data = Modelless(), numbers_module(Numbers(2), names, **changes)
        data.model = model
        caplog.clear()
        lightning(max_epochs=1).fit(module, datamodule=data)
        assert module.listener.numbers == [[columns, columns]]
        assert ("has no `model` whose forward names its columns" in caplog.text) is (columns == 2)


def test_an_error_about_a_dropped_column_has_a_note() -> None:
    def collate_unused(rows: list[Any]) -> dict[str, Any]:
        return {"x": torch.tensor([float(len(row["unused"])) for row in rows])}

    with pytest.raises(KeyError, match="unused") as caught:
        fit(PlainModule(), numbers_module(Numbers(2), collate_unused), max_epochs=1)
    notes: Any = caught.value.__notes__  # type: ignore[attr-defined]
    assert (
        "remove_unused_columns has left 'unused' out of the training set: RecordingModel.forward takes x" in notes[-1]
    )


def test_without_an_eval_dataset_fit_does_not_validate_or_warn(recwarn: pytest.WarningsRecorder) -> None:
    module = PlainModule()
    data = numbers_module(Numbers(4))
    fit(module, data, max_epochs=1)
    assert not [warning for warning in recwarn if "across ranks is zero" in str(warning.message)]
    data.eval_dataset = Numbers(2)
    fit(module, data, max_epochs=1)
    assert len(module.evaluated) == 1


def test_overfit_batches_reads_the_same_batches_in_each_epoch() -> None:
    model = fit(PlainModule(), numbers_module(Numbers(ROWS)), max_epochs=2, overfit_batches=1)
    assert model.numbers == [[0.0, 1.0, 2.0, 3.0]] * 2


def test_lightnings_batch_size_finder_sets_the_batch_size(tmp_path: Path) -> None:
    data = numbers_module(Numbers(ROWS))
    tuner = Tuner(lightning(max_epochs=1, default_root_dir=tmp_path))
    size = tuner.scale_batch_size(PlainModule(), datamodule=data, max_trials=2, init_val=2)
    assert data.batch_size == data.args.per_device_train_batch_size == size == 4  # type: ignore[union-attr]


def test_without_a_lightning_trainer_the_loaders_are_plain_data_loaders() -> None:
    data = numbers_module(Numbers(6), collate, Numbers(3), train_sampling_strategy="sequential")
    loader = data.train_dataloader()
    assert isinstance(loader, DataLoader) and isinstance(loader.sampler, SequentialSampler)
    assert [batch["x"].tolist() for batch in loader] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]]
    assert [batch["x"].tolist() for batch in data.val_dataloader()] == [[0.0, 1.0], [2.0]]
    assert data.state_dict() == {}


DROP_LAST = {**ARGUMENTS, "dataloader_drop_last": True}


@pytest.mark.parametrize(
    ("data", "method", "kind", "message"),
    [
        ({}, "fit", ValueError, r"no train_dataset for fit\(\): pass one to TrainerDataModule"),
        ({}, "predict", ValueError, r"no test_dataset for predict\(\)"),
        ({"train_dataset": Numbers(0)}, "fit", ValueError, "train_dataset is empty"),
        ({"test_dataset": {"a": Numbers(0)}}, "test", ValueError, "test_dataset 'a' is empty"),
        ({"train_dataset": DataLoader(Numbers(2))}, "fit", TypeError, "train_dataset is a DataLoader"),
        (
            {"train_dataset": Numbers(2), "args": DROP_LAST},
            "fit",
            ValueError,
            "2 samples are fewer than one batch of 4",
        ),
        ({"train_dataset": Numbers(2), "windows": True}, "fit", ValueError, "PlainModule has no items_in_window"),
        ({"args": 3}, "fit", TypeError, "args is an int"),
    ],
)
def test_data_that_cannot_be_read_is_refused_by_name(data: Any, method: str, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        getattr(lightning(max_epochs=1), method)(PlainModule(), datamodule=TrainerDataModule(**data))


def test_a_fit_that_fails_before_reading_leaves_no_position(tmp_path: Path) -> None:
    class Fails(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            raise RuntimeError("too early")

    checkpoint, data = tmp_path / "saved.ckpt", numbers_module(Numbers(ROWS))
    fit(PlainModule(), data, callbacks=[SaveOnce(checkpoint, "on_train_batch_end", 3)], max_epochs=1)
    again = numbers_module(Numbers(ROWS))
    with pytest.raises(RuntimeError, match="too early"):
        fit(PlainModule(), again, checkpoint=checkpoint, callbacks=[Fails()])
    assert len(fit(PlainModule(), again, max_epochs=1).records) == 6


def test_a_state_of_another_version_is_refused_and_an_evaluation_ignores_states() -> None:
    data = numbers_module(Numbers(ROWS))
    with pytest.raises(ValueError, match="has version 9"):
        data.load_state_dict({"version": 9, "processes": []})
    fit(PlainModule(), data, max_epochs=1)
    other, trainer, module = numbers_module(Numbers(ROWS), collate, Numbers(2)), lightning(max_epochs=1), PlainModule()
    trainer.validate(module, datamodule=other, verbose=False)
    other.load_state_dict(data.state_dict())
    trainer.fit(module, datamodule=other)
    assert len(module.model.records) == 6
