"""Which rows of a dataset are read, how many together, and how often their values are copied."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

from tests.scenarios.data import vector_rows
from tests.scenarios.models import tiny_gpt2
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

ROWS = 16
BATCH = 4


class FetchedByBatches(Dataset[Any]):
    """Counts what is fetched, in workers too; fetching no rows at all is an error."""

    def __init__(self, count: int = ROWS) -> None:
        self.rows = vector_rows(count)
        self.counts = torch.zeros(3, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.counts[0] += 1
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        torch.stack([self.rows[index]["x"] for index in indices])
        self.counts[1] += 1
        self.counts[2] += len(indices)
        return [self.rows[index] for index in indices]

    @property
    def fetched(self) -> dict[str, int]:
        """What has been fetched since this was asked last."""
        counts = dict(zip(("one by one", "batches", "rows in them"), self.counts.tolist(), strict=True))
        self.counts.zero_()
        return counts


def in_batches(number: int, rows: int) -> dict[str, int]:
    return {"one by one": 0, "batches": number, "rows in them": rows}


def trainer_over(folder: Path, training: Any, evaluation: Any = None, **changes: Any) -> Any:
    given = {"train_dataset": training, "eval_dataset": evaluation}
    settings = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, "num_train_epochs": 1}
    return quiet_trainer(folder, given=given, **{**settings, **changes})


@pytest.mark.parametrize(("workers", "accumulation"), [(0, 1), (0, 3), (2, 1)])
def test_training_evaluation_and_prediction_fetch_each_batch_in_one_go(
    tmp_path: Path, workers: int, accumulation: int
) -> None:
    training, evaluation = FetchedByBatches(), FetchedByBatches(7)
    trainer = trainer_over(
        *(tmp_path, training, evaluation),
        dataloader_num_workers=workers,
        gradient_accumulation_steps=accumulation,
        eval_strategy="epoch",
    )
    trainer.train()
    assert training.fetched == in_batches(4, ROWS)
    assert evaluation.fetched == in_batches(2, 7)
    trainer.evaluate()
    assert evaluation.fetched == in_batches(2, 7)
    trainer.predict(evaluation)
    assert evaluation.fetched == in_batches(2, 7)


# Measuring looks at the first sample twice and then at each, as transformers does.
@pytest.mark.parametrize(
    ("strategy", "measured"), [("sequential", 0), ("group_by_length", 2 + ROWS), ("batch_rebalance", 2 + ROWS)]
)
def test_so_do_other_orders_which_may_measure_all_samples_first(tmp_path: Path, strategy: str, measured: int) -> None:
    training = FetchedByBatches()
    trainer = trainer_over(tmp_path, training, train_sampling_strategy=strategy)
    trainer.processing_class = SimpleNamespace(model_input_names=["x"])
    assert len(list(trainer.get_train_dataloader())) == ROWS // BATCH
    assert training.fetched == {**in_batches(ROWS // BATCH, ROWS), "one by one": measured}


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_skipping_fetches_nothing_when_training_resumes(tmp_path: Path, workers: int, persistent: bool) -> None:
    settings = {"dataloader_num_workers": workers, "dataloader_persistent_workers": persistent}
    training = FetchedByBatches()
    whole = trainer_over(tmp_path, training, save_strategy="steps", save_steps=3, **settings)
    whole.train()
    assert training.fetched == in_batches(4, ROWS)
    resumed = trainer_over(tmp_path, training, save_strategy="steps", save_steps=3, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert training.fetched == in_batches(1, BATCH)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])


def table(count: int = ROWS) -> Any:
    rows = [{"x": row["x"].tolist(), "labels": row["labels"], "note": "unused"} for row in vector_rows(count)]
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("kind", [None, StepwiseTrainer])
def test_rows_of_a_table_are_decoded_once_and_a_batch_together(
    tmp_path: Path, rows_decoded: list[int], kind: Any
) -> None:
    whole = {} if kind is None else {"kind": kind}
    trainer = trainer_over(tmp_path, table().shuffle(seed=1), table(7), save_strategy="steps", save_steps=3, **whole)
    trainer.train()
    assert rows_decoded == [BATCH] * 4
    rows_decoded.clear()
    trainer.evaluate()
    trainer.predict(table(5).select([4, 0, 2]))
    assert rows_decoded == [4, 3, 3]
    rows_decoded.clear()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert rows_decoded == [BATCH]


@pytest.mark.parametrize("column", ["length", "input_ids"])
def test_grouping_by_length_decodes_the_rows_that_are_trained_on_alone(
    tmp_path: Path, rows_decoded: list[int], column: str
) -> None:
    ids = [[5] * (3 + number % 4) for number in range(ROWS)]
    columns = {"input_ids": ids, "labels": ids, **({"length": list(map(len, ids))} if column == "length" else {})}
    data = datasets.Dataset.from_dict(columns).shuffle(seed=2)
    trainer = quiet_trainer(
        *(tmp_path, tiny_gpt2()),
        given={"train_dataset": data, "eval_dataset": data, "data_collator": same_width},
        train_sampling_strategy="group_by_length",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=3,
        remove_unused_columns=column == "input_ids",
        num_train_epochs=2,
        eval_strategy="epoch",
    )
    trainer.train()
    # In each of two epochs 16 rows by fours, and 16 by threes, of which one is left for the last batch. Nothing else.
    assert Counter(rows_decoded) == {4: 2 * 4, 3: 2 * 5, 1: 2 * 1}


def same_width(samples: list[Any]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    padded = [sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    return {"input_ids": torch.tensor(padded), "labels": torch.tensor(padded)}


class Copies(TorchDispatchMode):
    """Counts the operations that fill the memory of a tensor: those that give no view of what they take.

    `torch.tensor` fills it out of sight, and shows what it has made by `lift_fresh`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        if operation.namespace == "aten" and (name == "lift_fresh" or not operation.is_view):
            self.counts[name] += 1
        return operation(*args, **(kwargs or {}))


INPUTS = 2


@pytest.mark.parametrize(
    "rows",
    [
        lambda: vector_rows(ROWS),
        lambda: table().remove_columns("note"),
        lambda: table().remove_columns("note").with_format("numpy"),
    ],
)
def test_on_the_cpu_each_input_of_a_batch_is_written_once(tmp_path: Path, rows: Any) -> None:
    trainer = trainer_over(tmp_path, rows())
    batches = iter(trainer.get_train_dataloader())
    next(batches)
    with Copies() as counted:
        (drawn,), _ = trainer.get_batch_samples(batches, 1, trainer.args.device)
        prepared = trainer._prepare_inputs(drawn)
    assert all(prepared[name] is value for name, value in drawn.items())
    assert 0 < sum(counted.counts.values()) <= INPUTS, counted.counts
