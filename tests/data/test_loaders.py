from __future__ import annotations

from collections import UserDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import send_to_device
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.data import loaders
from littrainer.data.loaders import (
    PrefetchLoader,
    move_batch,
    prepare_loader,
)
from littrainer.data.samplers import EpochSeededSampler
from littrainer.data.sharding import ShardSpec
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


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


def test_a_loader_knows_when_it_hands_out_its_last_batch_and_forgets_it_at_the_next_pass() -> None:
    dataset = Numbers(5)
    loader = PrefetchLoader(dataset, 2)
    next(iter(loader))
    for _ in range(2):
        assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    assert dataset.epochs == [0, 0, 1], "only a complete pass moves on to the next epoch"
    assert list(PrefetchLoader(Numbers(3), 4, drop_last=True)) == []


def test_the_epoch_reaches_dataset_sampler_and_batch_sampler() -> None:
    dataset = Numbers(4)
    sampler = EpochSeededSampler(dataset, data_seed=0)
    PrefetchLoader(dataset, 2, sampler=sampler).set_epoch(7)
    assert sampler.epoch == 7 and dataset.epochs == [7]

    class Batches:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter([[0], [1]])

    batches: Any = Batches()
    PrefetchLoader(dataset, batch_sampler=batches).set_epoch(8)
    assert batches.epoch == 8


class OwnBatches(BatchSampler):
    """Stands for the batch samplers that libraries bring."""


def test_batches_of_a_class_of_their_own_get_their_random_order_seeded_by_epoch_too(tmp_path: Path) -> None:
    dataset = Numbers(20)
    batches = OwnBatches(RandomSampler(dataset), batch_size=4, drop_last=False)
    loader = prepare_loader(quiet_arguments(tmp_path, data_seed=4), DataLoader(dataset, batch_sampler=batches))
    assert loader.batch_sampler is batches
    epochs = [[number for batch in loader for number in batch.tolist()] for _ in range(2)]
    expected = EpochSeededSampler(dataset, data_seed=4)
    assert epochs == [list(expected), list(expected)]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_loader_tells_of_all_processes_what_accelerates_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, drop_last: bool, split: bool
) -> None:
    share = ShardSpec(0, processes, split_batches=split) if processes > 1 else None
    monkeypatch.setattr(loaders, "find_shard", lambda args, settings: share)
    args = quiet_arguments(tmp_path)
    plain: DataLoader = DataLoader(Numbers(7), batch_size=4, drop_last=drop_last)
    ours = prepare_loader(args, plain)
    theirs = prepare_data_loader(plain, args.device, processes, 0, split_batches=split, put_on_device=True)
    names = ["total_batch_size", "total_dataset_length", "remainder", "device", "use_stateful_dataloader"]
    try:
        assert len(list(ours)) == len(list(theirs))
        assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


ELSEWHERE = torch.device("meta")
"""A device that every machine has and that is not the host."""


class MovesItself:
    """An object that a collator may make, as libraries for graphs do; its method takes the device alone."""

    def __init__(self, place: str = "host") -> None:
        self.place = place

    def to(self, device: Any) -> MovesItself:
        return MovesItself(str(device))


class OwnMapping(UserDict[str, Any]):
    """Keeps more than its items, and moves them itself."""

    extra = "kept"

    def to(self, device: Any, **_: Any) -> OwnMapping:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


Pair = namedtuple("Pair", ["first", "second"])


def test_whatever_a_batch_is_made_of_is_moved_as_accelerate_moves_it() -> None:
    def batch() -> Any:
        x, packed = torch.ones(2), torch.nn.utils.rnn.pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
        own = OwnMapping(x=torch.ones(1))
        return {"list": [x, (x, 3)], "pair": Pair(x, None), "nested": UserDict({"x": x}), "own": own, "packed": packed}

    def places(moved: Any) -> list[Any]:
        tensors = [moved["list"][0], moved["list"][1][0], moved["pair"].first, moved["nested"]["x"], moved["own"]["x"]]
        return [*map(type, moved.values()), *(tensor.device for tensor in tensors), moved["own"].extra]

    ours, theirs = move_batch(batch(), ELSEWHERE, True), send_to_device(batch(), ELSEWHERE, non_blocking=True)
    assert places(ours) == places(theirs)
    moved = move_batch({"own": MovesItself(), "text": "a"}, ELSEWHERE, True)
    assert moved["own"].place == "meta" and moved["text"] == "a"


@pytest.mark.parametrize("dataset", [Numbers(5), numbered_stream(5)])
def test_batches_of_a_loader_lie_on_the_device_and_are_counted(dataset: Any) -> None:
    loader = PrefetchLoader(dataset, 2, collate_fn=lambda samples: torch.zeros(len(samples)))
    loader.set_destination(ELSEWHERE, None)
    assert [(batch.device, len(batch)) for batch in loader] == [(ELSEWHERE, 2), (ELSEWHERE, 2), (ELSEWHERE, 1)]
    assert loader.rows_in_last_batch == 1


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_collator_that_reuses_its_memory_hands_out_its_own_rows(
    monkeypatch: pytest.MonkeyPatch, is_pinned: bool
) -> None:
    memory, waits = torch.empty(2), []

    def collate(samples: list[int]) -> dict[str, Any]:
        memory[: len(samples)] = torch.tensor(samples, dtype=torch.float32)
        return {"rows": [memory]}

    def copied(batch: Any, device: torch.device, non_blocking: bool) -> Any:
        waits.append(not non_blocking)
        return batch["rows"][0].tolist()

    monkeypatch.setattr(loaders, "move_batch", copied)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    # Torch pins nothing that is pinned already.
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda *_: is_pinned)
    monkeypatch.setattr(torch.utils.data._utils.pin_memory, "pin_memory", lambda batch, *_: batch)
    loader = PrefetchLoader(Numbers(8), 2, collate_fn=collate, pin_memory=True)
    loader.set_destination(torch.device("cuda"), AcceleratorConfig())
    assert list(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert waits == [is_pinned] * 4


@pytest.mark.parametrize(
    ("pinned", "device", "wished", "waits"),
    [
        (True, "cuda", False, False),
        (False, "cuda", False, True),
        (False, "cuda", True, False),
        (True, "mps", False, True),
    ],
)
def test_the_host_waits_for_copies_but_of_memory_that_was_pinned_for_them_or_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, pinned: bool, device: str, wished: bool, waits: bool
) -> None:
    # Without an accelerator in the machine torch takes the wish for pinned memory back.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    loader = PrefetchLoader(Numbers(2), pin_memory=pinned)
    loader.set_destination(torch.device(device), AcceleratorConfig(non_blocking=wished))
    assert loader.blocking_copies is waits


def test_all_loaders_of_a_trainer_and_prepared_ones_hand_out_batches_on_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = quiet_trainer(tmp_path)
    monkeypatch.setitem(vars(trainer.args), "device", ELSEWHERE)
    own: Any = DataLoader(Rows(vector_rows(4)), 2)
    loaders: list[Any] = [
        trainer.get_train_dataloader(),
        trainer.get_eval_dataloader(),
        trainer.get_test_dataloader(Rows(vector_rows(3))),
        trainer.accelerator.prepare(own),
    ]
    assert {next(iter(loader))["x"].device for loader in loaders} == {ELSEWHERE}
    assert trainer.accelerator.prepare_data_loader(own, device_placement=False).destination is None

    class OwnClass(DataLoader[Any]):
        pass

    # Documented in the table of the accelerator's members; `_prepare_inputs` moves these batches.
    left = trainer.accelerator.prepare(OwnClass(Rows(vector_rows(4)), 2))
    assert type(left) is OwnClass and next(iter(left))["x"].device.type == "cpu"
