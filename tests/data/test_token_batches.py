from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from littrainer import Trainer
from littrainer.data.token_batches import form_equal_groups, form_groups
from littrainer.evaluation.gathering import BatchOutputs, restore_dataset_order
from tests.loop.exact_resume import differences_after_resuming, noisy_trainer
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import AugmentedRows, Rows, SizedStream, Stream, token_rows, vector_rows
from tests.scenarios.models import tiny_bert_classifier
from tests.scenarios.trainers import quiet_trainer

ROWS = token_rows(60, longest=30)
LENGTHS = [len(row["input_ids"]) for row in ROWS]


def trainer_over(folder: Path, data: Any, eval_data: Any = None, kind: Any = Trainer, **changes: Any) -> Any:
    torch.manual_seed(0)
    keywords = {"train_dataset": data, "eval_dataset": eval_data, "data_collator": pad_tokens}
    return quiet_trainer(folder, tiny_bert_classifier(), trainer_kwargs=keywords, kind=kind, **changes)


def samples_drawn(loader: Any, epoch: int) -> list[list[int]]:
    loader.set_epoch(epoch)
    return list(loader.batch_sampler)


def test_batches_contain_each_sample_once_within_the_limit_and_are_shuffled_in_each_epoch(tmp_path: Path) -> None:
    loader = trainer_over(tmp_path, Rows(ROWS), max_tokens_per_batch=64).get_train_dataloader()
    epochs = [samples_drawn(loader, epoch) for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    for batches in epochs:
        assert sorted(chain.from_iterable(batches)) == list(range(len(ROWS)))
        assert len(batches) == len(loader)
        assert max(len(batch) * max(LENGTHS[index] for index in batch) for batch in batches) <= 64
    assert [batch["input_ids"].numel() <= 64 for batch in loader] == [True] * len(loader)


def test_at_most_3_percent_is_padding() -> None:
    # The lengths of benchmarks/measured/length_grouping.py.
    lengths = torch.randint(1, 64, (1000,), generator=torch.Generator().manual_seed(0)).numpy()
    lengths = np.sort(lengths)[::-1]
    groups = form_groups(lengths, 512)
    with_padding = sum(len(group) * lengths[group].max() for group in groups)
    assert lengths.sum() / with_padding > 0.97


def test_padding_to_a_multiple_counts(tmp_path: Path) -> None:
    class PadToEight:
        pad_to_multiple_of = 8

        def __call__(self, rows: list[Any]) -> Any:
            batch = pad_tokens(rows)
            gap = -batch["input_ids"].shape[1] % 8
            ids = torch.nn.functional.pad(batch["input_ids"], (0, gap))
            return {"input_ids": ids, "labels": batch["labels"]}

    trainer = trainer_over(tmp_path, Rows(ROWS), max_tokens_per_batch=64)
    trainer.data_collator = PadToEight()
    sizes = [batch["input_ids"].numel() for batch in trainer.get_train_dataloader()]
    assert max(sizes) == 64 and sum(sizes) > 0.8 * 64 * len(sizes)


@pytest.mark.parametrize("form", ["pad_rows to a fixed length", "measured before"])
def test_a_batch_above_the_limit_is_refused(tmp_path: Path, form: str) -> None:
    def pad_rows(rows: list[Any]) -> Any:
        batch = pad_tokens(rows)
        gap = 100 - batch["input_ids"].shape[1] if form == "pad_rows to a fixed length" else 0
        return {"input_ids": torch.nn.functional.pad(batch["input_ids"], (0, gap)), "labels": batch["labels"]}

    data = Rows(ROWS)
    trainer = trainer_over(tmp_path, data, max_tokens_per_batch=64)
    trainer.data_collator = pad_rows
    loader = trainer.get_train_dataloader()
    if form == "measured before":
        data.rows = token_rows(60, shortest=40, longest=40)
    with pytest.raises(ValueError, match=r"max_tokens_per_batch=64: .* a batch of \d+ x (100|40) tokens"):
        list(loader)


def test_overfitting_reads_the_same_batches_in_each_epoch(tmp_path: Path) -> None:
    trainer = trainer_over(tmp_path, Rows(ROWS), max_tokens_per_batch=64, lightning={"overfit_batches": 2})
    loader = trainer.get_train_dataloader()
    assert samples_drawn(loader, 0) == samples_drawn(loader, 1)
    assert trainer.train().global_step == 6


def test_outputs_without_a_row_for_each_sample_are_refused() -> None:
    outputs = BatchOutputs(predictions={"scores": np.arange(4), "loss": np.array(0.5)})
    order = np.array([2, 0, 3, 1])
    assert restore_dataset_order(outputs, order).predictions["scores"].tolist() == [1, 3, 0, 2]
    with pytest.raises(ValueError, match="outputs with 4 rows cannot be put in the order of 3 samples"):
        restore_dataset_order(outputs, order[:3])


@pytest.mark.parametrize("processes", [2, 3, 8])
def test_processes_get_equally_many_batches_without_repeated_samples(processes: int) -> None:
    lengths = np.sort(LENGTHS)[::-1]
    groups = form_groups(lengths, 64, processes)
    assert len(groups) % processes == 0
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    rounds, last = form_equal_groups(lengths, 64, processes)
    sizes = [{len(group) for group in rounds[start : start + processes]} for start in range(0, len(rounds), processes)]
    assert all(len(group_sizes) == 1 for group_sizes in sizes)
    last_samples = np.concatenate(rounds[-processes:])[:last]
    assert sorted([*np.concatenate(rounds[:-processes]).tolist(), *last_samples.tolist()]) == list(range(len(lengths)))


def test_evaluation_results_are_in_the_datasets_order(tmp_path: Path) -> None:
    data = Rows(ROWS)
    fixed = trainer_over(tmp_path, data, data, eval_loss_weighting="samples")
    expected = fixed.predict(data)
    trainer = trainer_over(tmp_path, data, data, max_tokens_per_batch=64)
    results = trainer.predict(data)
    assert results.label_ids.tolist() == expected.label_ids.tolist() == [row["labels"] for row in ROWS]
    assert np.allclose(results.predictions, expected.predictions, atol=1e-6)
    assert results.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-5)
    limited = trainer_over(tmp_path, data, max_tokens_per_batch=64, lightning={"limit_test_batches": 3})
    some = limited.predict(data).predictions
    longest = sorted(sorted(range(len(ROWS)), key=lambda index: -LENGTHS[index])[: len(some)])
    assert len(some) < len(ROWS) and np.allclose(some, expected.predictions[longest], atol=1e-6)


class WithLengths(Rows):
    @property
    def lengths(self) -> list[int]:
        return [10] * len(self.rows)


@pytest.mark.parametrize("form", ["attribute", "column"])
def test_lengths_are_read_from_the_dataset(tmp_path: Path, form: str) -> None:
    data: Any = WithLengths(ROWS)
    if form == "column":
        data = datasets.Dataset.from_list([{**row, "length": 10} for row in ROWS])
    loader = trainer_over(tmp_path, data, max_tokens_per_batch=40).get_train_dataloader()
    assert Counter(len(batch) for batch in loader.batch_sampler) == {4: 15}


def test_a_dataset_is_measured_once(tmp_path: Path) -> None:
    class Counted(Rows):
        reads = 0

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            return super().__getitem__(index)

    data = Counted(ROWS)
    trainer = trainer_over(tmp_path, Rows(ROWS), data, max_tokens_per_batch=64)
    trainer.evaluate()
    before = data.reads
    trainer.evaluate()
    assert data.reads - before == len(ROWS)


def test_steps_and_samples_are_planned(tmp_path: Path) -> None:
    trainer = trainer_over(tmp_path, Rows(ROWS), max_tokens_per_batch=64, num_train_epochs=2)
    loader = trainer.get_train_dataloader()
    assert trainer.num_examples(loader) == len(ROWS)
    output = trainer.train()
    assert output.global_step == trainer.state.max_steps == 2 * len(loader)
    samples = output.metrics["train_samples_per_second"] * output.metrics["train_runtime"]
    assert samples == pytest.approx(2 * len(ROWS), rel=0.05)


class WithWidths(AugmentedRows):
    """Vectors with lengths as of texts."""

    @property
    def lengths(self) -> list[int]:
        return [2 + index % 5 for index in range(len(self.rows))]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_training_equals_an_uninterrupted_training(tmp_path: Path, workers: int) -> None:
    def build() -> Any:
        changes: Any = {"gradient_accumulation_steps": 2, "dataloader_num_workers": workers}
        return noisy_trainer(tmp_path, WithWidths(vector_rows(21)), max_tokens_per_batch=15, **changes)

    assert differences_after_resuming(tmp_path, build, 2, 5) == {}


def test_the_exact_loss_does_not_depend_on_batch_sizes(tmp_path: Path) -> None:
    results = []
    for changes in (
        {"max_tokens_per_batch": 64, "gradient_accumulation_steps": 100},
        {"per_device_train_batch_size": 60},
    ):
        settings = {"num_train_epochs": 1, "logging_strategy": "steps", "logging_steps": 1, **changes}
        trainer = trainer_over(tmp_path, Rows(ROWS), loss_normalization="exact", **settings)
        for module in trainer.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        trainer.train()
        results.append((trainer.state.log_history[0]["loss"], trainer.state.log_history[0]["grad_norm"]))
    assert results[0] == pytest.approx(results[1], rel=1e-6)


class CustomSamplerTrainer(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.WeightedRandomSampler([1.0] * len(ROWS), 10)


# Case -> data, changes of the arguments, and pattern of the error.
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a sample that is too long": (
        Rows(ROWS),
        {"max_tokens_per_batch": 20},
        r"26 of 60 samples are longer.*=30 or more",
    ),
    "a sample to evaluate that is too long": (
        Rows(ROWS[:2]),
        {
            "max_tokens_per_batch": 32,
            "eval_strategy": "epoch",
            "eval_data": {"a": Rows(token_rows(3, shortest=40, longest=40))},
        },
        "3 of 3 samples are longer",
    ),
    "a stream": (Stream(ROWS), {"max_tokens_per_batch": 64, "max_steps": 2}, "pass a map-style dataset"),
    "a stream with a length": (SizedStream(ROWS), {"max_tokens_per_batch": 64}, "pass a map-style dataset"),
    "samples without length": (Rows(vector_rows(4)), {"max_tokens_per_batch": 64}, "an attribute `lengths`"),
    "an order of the script's own": (
        Rows(ROWS),
        {"max_tokens_per_batch": 64, "kind": CustomSamplerTrainer},
        "cannot follow the WeightedRandomSampler",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_data_that_cannot_be_batched_by_tokens_is_refused_before_training(tmp_path: Path, name: str) -> None:
    data, changes, words = REFUSED[name]
    trainer = trainer_over(tmp_path, data, **changes)
    with pytest.raises(ValueError, match=words):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("name", ["max_tokens_per_batch", "pack_to_length"])
def test_a_loader_of_the_script_keeps_its_batches_with_a_warning(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    class CustomLoaderTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=30, collate_fn=pad_tokens)

    trainer = trainer_over(tmp_path, Rows(ROWS), kind=CustomLoaderTrainer, num_train_epochs=1, **{name: 64})
    assert trainer.train().global_step == 2
    assert caplog.text.count(f"{name} has no effect in training: get_train_dataloader returns a DataLoader.") == 1
