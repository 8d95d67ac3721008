from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import find_batch_size

from littrainer.data import loaders
from littrainer.data.loaders import (
    LookaheadLoader,
    build_loader,
    count_examples,
    first_dimension,
    has_length,
    lookahead_version,
)
from littrainer.data.samplers import EpochSeededSampler
from littrainer.data.sharding import Share
from tests.scenarios.data import SizedStream, Stream
from tests.scenarios.trainers import quiet_arguments


class Numbers(Dataset[int]):
    """The numbers up to `count`; notes which were read, and which epoch it was told."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def numbered_stream(count: int) -> Stream:
    return Stream([{"n": number} for number in range(count)])


def numbers_in(samples: list[Any]) -> list[int]:
    return [sample["n"] for sample in samples]


def test_exactly_one_batch_is_collated_ahead_of_the_one_handed_out() -> None:
    collated: list[list[int]] = []

    def collate(samples: list[int]) -> list[int]:
        collated.append(samples)
        return samples

    ahead = [len(collated) - number for number, _ in enumerate(LookaheadLoader(Numbers(8), 2, collate_fn=collate), 1)]
    assert ahead == [1, 1, 1, 0]


def test_a_loader_knows_when_it_hands_out_its_last_batch_and_forgets_it_at_the_next_pass() -> None:
    dataset = Numbers(5)
    loader = LookaheadLoader(dataset, 2)
    next(iter(loader))
    for _ in range(2):
        assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    assert dataset.epochs == [0, 0, 1], "only a complete pass moves on to the next epoch"
    assert list(LookaheadLoader(Numbers(3), 4, drop_last=True)) == []


def test_the_epoch_reaches_dataset_sampler_and_batch_sampler() -> None:
    dataset = Numbers(4)
    sampler = EpochSeededSampler(dataset, data_seed=0)
    LookaheadLoader(dataset, 2, sampler=sampler).set_epoch(7)
    assert sampler.epoch == 7 and dataset.epochs == [7]

    class Batches:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter([[0], [1]])

    batches: Any = Batches()
    LookaheadLoader(dataset, batch_sampler=batches).set_epoch(8)
    assert batches.epoch == 8


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (LookaheadLoader(Numbers(10), 4), 2),
        (LookaheadLoader(Numbers(8), 4), None),
        (LookaheadLoader(Numbers(3), 4), 3),
        (LookaheadLoader(Numbers(10), 4, drop_last=True), None),
        (LookaheadLoader(numbered_stream(10), 4), 2),
        (LookaheadLoader(Numbers(10), batch_size=None), None),
    ],
)
def test_a_last_batch_that_is_not_full_has_its_samples_counted(loader: LookaheadLoader, samples: int | None) -> None:
    list(loader)
    assert loader.samples_in_last_batch() == samples


def loader_for(folder: Path, dataset: Any, sampler: Any = None, is_training: bool = True, **changes: Any) -> Any:
    return build_loader(
        quiet_arguments(folder, **changes),
        dataset,
        collate=list,
        batch_size=3,
        sampler=sampler,
        is_training=is_training,
    )


def test_a_stream_is_read_in_its_own_order_to_its_end(tmp_path: Path) -> None:
    loader = loader_for(tmp_path, numbered_stream(7), sampler=SequentialSampler([1]), dataloader_drop_last=True)
    assert [numbers_in(batch) for batch in loader] == [[0, 1, 2], [3, 4, 5], [6]]


class OwnBatches(BatchSampler):
    """Stands for the batch samplers that libraries bring."""


def test_batches_of_a_class_of_their_own_get_their_random_order_seeded_by_epoch_too(tmp_path: Path) -> None:
    dataset = Numbers(20)
    batches = OwnBatches(RandomSampler(dataset), batch_size=4, drop_last=False)
    loader = lookahead_version(quiet_arguments(tmp_path, data_seed=4), DataLoader(dataset, batch_sampler=batches))
    assert loader.batch_sampler is batches
    epochs = [[number for batch in loader for number in batch.tolist()] for _ in range(2)]
    expected = EpochSeededSampler(dataset, data_seed=4)
    assert epochs == [list(expected), list(expected)]
    assert epochs[0] != epochs[1]


class RaisesLength:
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __len__(self) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("dataset", "known"),
    [
        ([], True),
        (Numbers(0), True),
        (SizedStream([]), True),
        (numbered_stream(2), False),
        (None, False),
        (RaisesLength(TypeError), False),
        (RaisesLength(AttributeError), False),
        (RaisesLength(NotImplementedError), False),
    ],
)
def test_a_length_is_known_where_len_gives_a_number(dataset: Any, known: bool) -> None:
    assert has_length(dataset) is known


def test_examples_are_counted_in_the_dataset_or_estimated_from_the_batches() -> None:
    assert count_examples(LookaheadLoader(Numbers(10), 4), batch_size=4) == 10
    assert count_examples(["batch"] * 3, batch_size=4) == 12


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(3, 2),
        torch.tensor(1.0),
        np.zeros((4, 1)),
        {"n": torch.tensor(1), "x": torch.zeros(5)},
        ({"a": None}, [torch.zeros(2)]),
        {"text": "abc"},
        [],
        None,
    ],
)
def test_the_samples_of_a_batch_are_counted_where_transformers_counts_them(batch: Any) -> None:
    assert first_dimension(batch) == find_batch_size(batch)


@pytest.mark.parametrize(("processes", "samples"), [(1, 2), (2, 2), (3, 10), (5, None)])
def test_the_last_batch_counts_the_samples_that_all_processes_have_left(processes: int, samples: int | None) -> None:
    loader = LookaheadLoader(Numbers(10 if samples else 20), 4)
    loader.processes = processes
    assert loader.samples_in_last_batch() == samples


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_loader_tells_of_all_processes_what_accelerates_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, drop_last: bool, split: bool
) -> None:
    share = Share(0, processes, split_batches=split) if processes > 1 else None
    monkeypatch.setattr(loaders, "share_of", lambda args, settings: share)
    args = quiet_arguments(tmp_path)
    plain: DataLoader = DataLoader(Numbers(7), batch_size=4, drop_last=drop_last)
    ours = lookahead_version(args, plain)
    theirs = prepare_data_loader(plain, args.device, processes, 0, split_batches=split, put_on_device=True)
    names = ["total_batch_size", "total_dataset_length", "remainder", "device", "use_stateful_dataloader"]
    try:
        assert len(list(ours)) == len(list(theirs))
        assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def test_how_many_samples_a_batch_of_all_processes_has_is_asked_of_what_makes_the_batches() -> None:
    whole = LookaheadLoader(Numbers(6), batch_size=None, sampler=BatchSampler(range(6), 2, False))
    assert whole.total_batch_size == 2
    own: Any = [[0, 1, 2], [3]]
    assert not hasattr(LookaheadLoader(Numbers(4), batch_sampler=own), "total_batch_size")
