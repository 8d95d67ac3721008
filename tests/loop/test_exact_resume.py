"""A resumed training is equal to an uninterrupted training, bit for bit, with all random draws."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from littrainer import Trainer, TrainerCallback
from tests.loop.exact_resume import (
    ShuffledStream,
    StreamWithState,
    differences_after_resuming,
    noisy_trainer,
)
from tests.scenarios.data import AugmentedRows, vector_rows


def augmented() -> AugmentedRows:
    """Return 18 rows, or five micro-batches, with noise from all generators."""
    return AugmentedRows(vector_rows(18))


def collate_with_noise(rows: list[Any]) -> Any:
    """Collate with draws from all generators, and an odd number of normal variates from NumPy's."""
    noise = torch.rand(1) + random.random() + np.random.random() + np.random.randn()
    x = torch.stack([row["x"] for row in rows])
    return {"x": x + 0.1 * noise, "labels": torch.tensor([row["labels"] for row in rows])}


class CustomLoaderTrainer(Trainer):
    """A Trainer with a custom DataLoader whose generator continues from epoch to epoch."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(
            self.train_dataset,
            batch_size=4,
            shuffle=True,
            generator=torch.Generator().manual_seed(3),
            collate_fn=collate_with_noise,
        )


class PlainLoaderTrainer(Trainer):
    """A Trainer whose loader is a plain iterable in random order."""

    def get_train_dataloader(self) -> Any:
        rows = self.train_dataset

        class Batches:
            def __len__(self) -> int:
                return 5

            def __iter__(self) -> Iterator[Any]:
                order = torch.randperm(len(rows)).tolist()
                for start in range(0, len(order), 4):
                    yield collate_with_noise([rows[index] for index in order[start : start + 4]])

        return Batches()


class PreparedLoaderTrainer(Trainer):
    """A Trainer with a custom loader that `accelerator.prepare` wraps with prefetching."""

    def get_train_dataloader(self) -> Any:
        loader = DataLoader(self.train_dataset, batch_size=4, shuffle=True, collate_fn=collate_with_noise)
        return self.accelerator.prepare(loader)


WITH_NOISE = {"data_collator": collate_with_noise}


CASES: dict[str, tuple[Any, dict[str, Any], tuple[int, ...]]] = {
    "within and at the end of epochs": (augmented, {}, (1, 3, 5, 6, 9)),
    "windows of two, the last of one": (
        augmented,
        {"gradient_accumulation_steps": 2, "num_train_epochs": 3, "trainer_kwargs": WITH_NOISE},
        (1, 2, 3, 5),
    ),
    "in its own order": (augmented, {"train_sampling_strategy": "sequential"}, (2, 7)),
    "evaluations between steps": (augmented, {"eval_strategy": "steps", "eval_steps": 2}, (3, 4)),
    "evaluations after epochs": (augmented, {"eval_strategy": "epoch", "num_train_epochs": 3}, (5, 6, 10)),
    "saved after epochs": (augmented, {"eval_strategy": "epoch", "save_strategy": "epoch"}, (5,)),
    "a stream in a new order in each pass": (
        lambda: ShuffledStream(vector_rows(18)),
        {"max_steps": 12, "trainer_kwargs": WITH_NOISE},
        (1, 5, 7),
    ),
    "a stream with state": (lambda: StreamWithState(vector_rows(18)), {"max_steps": 12}, (1, 5, 7)),
    "a loader with a generator": (augmented, {"kind": CustomLoaderTrainer}, (1, 5, 7)),
    "a loader with prefetching": (augmented, {"kind": PreparedLoaderTrainer}, (1, 5, 7)),
    "batches from any object": (augmented, {"kind": PlainLoaderTrainer}, (1, 5, 7)),
    "two workers": (augmented, {"dataloader_num_workers": 2, "trainer_kwargs": WITH_NOISE}, (3, 6)),
    "two workers that live on": (
        augmented,
        {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "trainer_kwargs": WITH_NOISE},
        (5, 8),
    ),
    "a stream read by two workers": (
        lambda: ShuffledStream(vector_rows(18)),
        {"dataloader_num_workers": 2, "max_steps": 9, "trainer_kwargs": WITH_NOISE},
        (7,),
    ),
}


@pytest.mark.parametrize(("data", "changes", "steps"), CASES.values(), ids=CASES)
def test_a_resumed_training_is_equal_to_an_uninterrupted_training(
    tmp_path: Path, data: Any, changes: dict[str, Any], steps: tuple[int, ...]
) -> None:
    assert differences_after_resuming(tmp_path, lambda: noisy_trainer(tmp_path, data(), **changes), *steps) == {}


# Records of littrainer on 2026-11-29, with earlier forms of states.
@pytest.mark.parametrize(
    ("record", "case", "step"),
    [("workers", "two workers that live on", 8), ("stream", "a stream with state", 7)],
)
def test_a_record_of_an_earlier_littrainer_resumes_exactly(tmp_path: Path, record: str, case: str, step: int) -> None:
    data, changes, _ = CASES[case]

    def build() -> Trainer:
        checkpoint = tmp_path / f"checkpoint-{step}"
        if checkpoint.exists():
            earlier, current = Path(__file__).parent / "records" / f"{record}.pt", checkpoint / "littrainer_resume.pt"
            assert torch.load(earlier, weights_only=False).keys() == torch.load(current, weights_only=False).keys()
            shutil.copy(earlier, current)
            (checkpoint / "littrainer_manifest.json").unlink()
        return noisy_trainer(tmp_path, data(), **changes)

    assert differences_after_resuming(tmp_path, build, step) == {}


def test_an_epoch_that_a_callback_ended_is_not_continued(tmp_path: Path) -> None:
    class CutShort(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = state.global_step in (2, 5)

    def build() -> Trainer:
        return noisy_trainer(tmp_path, augmented(), trainer_kwargs={"callbacks": [CutShort()]}, num_train_epochs=3)

    assert differences_after_resuming(tmp_path, build, 1, 2, 3, 5, 6) == {}


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_streamed_dataset_is_read_again_only_with_a_shuffle_buffer(tmp_path: Path, shuffled: bool) -> None:
    from datasets import Dataset

    read: list[int] = []

    def record(row: Any) -> Any:
        read.append(1)
        return row

    def stream() -> Any:
        columns = {"x": [row["x"].tolist() for row in vector_rows(60)], "labels": [0, 1, 2] * 20}
        rows = Dataset.from_dict(columns).to_iterable_dataset().map(record)
        return (rows.shuffle(seed=1, buffer_size=8) if shuffled else rows).with_format("torch")

    settings = {"max_steps": 10, "save_steps": 8}
    expected = noisy_trainer(tmp_path, stream(), **settings)
    expected.train()
    read.clear()
    resumed = noisy_trainer(tmp_path, stream(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert len(read) >= 44 if shuffled else len(read) == 12
    weights = expected.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in resumed.model.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (ShuffledStream, {"gradient_accumulation_steps": 2}),
        (ShuffledStream, {"dataloader_num_workers": 2}),
        (StreamWithState, {"save_strategy": "epoch"}),
    ],
    ids=str,
)
def test_a_prolonged_training_continues_a_stream(tmp_path: Path, kind: Any, changes: dict[str, Any]) -> None:
    def trained(steps: int, checkpoint: Any = None) -> Trainer:
        changed = {"lr_scheduler_type": "constant", **changes, "max_steps": steps}
        trainer = noisy_trainer(tmp_path, kind(vector_rows(60)), **changed)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert (trainer.state.global_step, trainer.state.epoch) == (steps, 1.0)
        return trainer

    reference, _, prolonged = trained(5), trained(3), trained(5, str(tmp_path / "checkpoint-3"))
    weights = reference.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in prolonged.model.state_dict().items())
