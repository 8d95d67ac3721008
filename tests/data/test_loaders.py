from __future__ import annotations

import multiprocessing
import os
import time
from collections import UserDict, namedtuple
from collections.abc import Callable
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
from littrainer.data.loaders import PrefetchLoader, build_loader, move_batch, prepare_loader
from littrainer.data.samplers import EpochSeededSampler
from littrainer.data.sharding import ShardSpec
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.other_processes import MAX_WAIT_SECONDS
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


class Numbers(Dataset[int]):
    """Dataset of numbers, which records reads and epochs."""

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


def make_numbers_stream(count: int) -> Stream:
    return Stream([{"n": number} for number in range(count)])


def test_end_of_dataloader_is_true_at_the_last_batch_and_reset_in_the_next_epoch() -> None:
    dataset = Numbers(5)
    loader = PrefetchLoader(dataset, 2)
    next(iter(loader))
    for _ in range(2):
        assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    assert dataset.epochs == [0, 0, 1], "only a complete iteration increments the epoch"
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


class CustomBatchSampler(BatchSampler):
    """Batch sampler of another library."""


def test_a_custom_batch_sampler_gets_an_order_seeded_by_epoch(tmp_path: Path) -> None:
    dataset = Numbers(20)
    batches = CustomBatchSampler(RandomSampler(dataset), batch_size=4, drop_last=False)
    loader = prepare_loader(quiet_arguments(tmp_path, data_seed=4), DataLoader(dataset, batch_sampler=batches))
    assert loader.batch_sampler is batches
    epochs = [[number for batch in loader for number in batch.tolist()] for _ in range(2)]
    expected = EpochSeededSampler(dataset, data_seed=4)
    assert epochs == [list(expected), list(expected)]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_loader_has_the_attributes_of_accelerates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, drop_last: bool, split: bool
) -> None:
    shard = ShardSpec(0, processes, split_batches=split) if processes > 1 else None
    monkeypatch.setattr(loaders, "find_shard", lambda args, settings: shard)
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
"""A device other than the host, on any machine."""


class MovableGraph:
    """Object of a collator, whose `to` accepts the device only."""

    def __init__(self, device: str = "host") -> None:
        self.device = device

    def to(self, device: Any) -> MovableGraph:
        return MovableGraph(str(device))


class MovableMapping(UserDict[str, Any]):
    """Mapping with a further attribute and a `to` method."""

    extra = "extra"

    def to(self, device: Any, **_: Any) -> MovableMapping:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


Pair = namedtuple("Pair", ["first", "second"])


def test_nested_batches_are_moved_as_by_accelerate() -> None:
    def batch() -> Any:
        x, packed = torch.ones(2), torch.nn.utils.rnn.pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
        custom = MovableMapping(x=torch.ones(1))
        return {
            "list": [x, (x, 3)],
            "pair": Pair(x, None),
            "nested": UserDict({"x": x}),
            "custom": custom,
            "packed": packed,
        }

    def describe_devices(moved: Any) -> list[Any]:
        tensors = [
            moved["list"][0],
            moved["list"][1][0],
            moved["pair"].first,
            moved["nested"]["x"],
            moved["custom"]["x"],
        ]
        return [*map(type, moved.values()), *(tensor.device for tensor in tensors), moved["custom"].extra]

    ours, theirs = move_batch(batch(), ELSEWHERE, True), send_to_device(batch(), ELSEWHERE, non_blocking=True)
    assert describe_devices(ours) == describe_devices(theirs)
    moved = move_batch({"custom": MovableGraph(), "text": "a"}, ELSEWHERE, True)
    assert moved["custom"].device == "meta" and moved["text"] == "a"


@pytest.mark.parametrize("dataset", [Numbers(5), make_numbers_stream(5)])
def test_batches_are_moved_to_the_device_and_counted(dataset: Any) -> None:
    loader = PrefetchLoader(dataset, 2, collate_fn=lambda samples: torch.zeros(len(samples)))
    loader.set_destination(ELSEWHERE, None)
    assert [(batch.device, len(batch)) for batch in loader] == [(ELSEWHERE, 2), (ELSEWHERE, 2), (ELSEWHERE, 1)]
    assert loader.rows_in_last_batch == 1


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_collator_may_reuse_its_memory(monkeypatch: pytest.MonkeyPatch, is_pinned: bool) -> None:
    memory, waits = torch.empty(2), []

    def collate(samples: list[int]) -> dict[str, Any]:
        memory[: len(samples)] = torch.tensor(samples, dtype=torch.float32)
        return {"rows": [memory]}

    def copy_rows(batch: Any, device: torch.device, non_blocking: bool) -> Any:
        waits.append(not non_blocking)
        return batch["rows"][0].tolist()

    monkeypatch.setattr(loaders, "move_batch", copy_rows)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    # torch does not pin memory again.
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda *_: is_pinned)
    monkeypatch.setattr(torch.utils.data._utils.pin_memory, "pin_memory", lambda batch, *_: batch)
    loader = PrefetchLoader(Numbers(8), 2, collate_fn=collate, pin_memory=True)
    loader.set_destination(torch.device("cuda"), AcceleratorConfig())
    assert list(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert waits == [is_pinned] * 4


@pytest.mark.parametrize(
    ("pinned", "device", "non_blocking", "waits"),
    [
        (True, "cuda", False, False),
        (False, "cuda", False, True),
        (False, "cuda", True, False),
        (True, "mps", False, True),
    ],
)
def test_copies_block_unless_memory_is_pinned_or_non_blocking_is_set(
    monkeypatch: pytest.MonkeyPatch, pinned: bool, device: str, non_blocking: bool, waits: bool
) -> None:
    # Without an accelerator torch would disable pinned memory.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    loader = PrefetchLoader(Numbers(2), pin_memory=pinned)
    loader.set_destination(torch.device(device), AcceleratorConfig(non_blocking=non_blocking))
    assert loader.blocking_copies is waits


def test_all_loaders_of_a_trainer_move_batches_to_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet_trainer(tmp_path)
    monkeypatch.setitem(vars(trainer.args), "device", ELSEWHERE)
    custom: Any = DataLoader(Rows(vector_rows(4)), 2)
    loaders: list[Any] = [
        trainer.get_train_dataloader(),
        trainer.get_eval_dataloader(),
        trainer.get_test_dataloader(Rows(vector_rows(3))),
        trainer.accelerator.prepare(custom),
    ]
    assert {next(iter(loader))["x"].device for loader in loaders} == {ELSEWHERE}
    assert trainer.accelerator.prepare_data_loader(custom, device_placement=False).destination is None

    class CustomLoader(DataLoader[Any]):
        pass

    # `_prepare_inputs` moves these batches.
    prepared = trainer.accelerator.prepare(CustomLoader(Rows(vector_rows(4)), 2))
    assert type(prepared) is CustomLoader and next(iter(prepared))["x"].device.type == "cpu"


# ---- Arguments dataloader_* ------------------------------------------------------------------------------------------


class Observed:
    """Samples with the process that read them.

    Parameters:
        is_slow: reading sample 0 waits for the last sample, which is in the other worker's second batch.
    """

    def __init__(self, is_slow: bool) -> None:
        self.last_is_read = multiprocessing.Event() if is_slow else None

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, int]:
        if self.last_is_read is not None and index == 9:
            self.last_is_read.set()
        if self.last_is_read is not None and index == 0:
            assert self.last_is_read.wait(MAX_WAIT_SECONDS)
            # Lets the other worker's first batch arrive before.
            time.sleep(0.2)
        return index, os.getpid()


def make_loader(folder: Path, is_slow: bool, **changes: Any) -> Any:
    args, data = quiet_arguments(folder, **changes), Observed(is_slow)
    return build_loader(args, data, collate=list, batch_size=3, sampler=None, is_training=True)


def processes(loader: Any) -> frozenset[int]:
    return frozenset(pid for batch in loader for _, pid in batch)


def has_persistent_workers(loader: Any) -> bool:
    return processes(loader) == processes(loader)


def is_in_order(loader: Any) -> bool:
    return next(iter(loader))[0][0] == 0


TWO_WORKERS = {"dataloader_num_workers": 2}

EFFECTS: dict[str, tuple[Any, dict[str, Any], Callable[[Any], Any], Any, Any]] = {
    "dataloader_num_workers": (2, {}, lambda loader: len(processes(loader) - {os.getpid()}), 0, 2),
    "dataloader_persistent_workers": (True, TWO_WORKERS, has_persistent_workers, False, True),
    "dataloader_in_order": (False, TWO_WORKERS, is_in_order, True, False),
}
"""Argument -> value, further settings, observation, and its result without and with the value."""


@pytest.mark.parametrize("name", EFFECTS)
def test_a_dataloader_argument_changes_what_the_loader_does(tmp_path: Path, name: str) -> None:
    value, settings, observe, without, with_value = EFFECTS[name]
    observed = [
        observe(make_loader(tmp_path, name == "dataloader_in_order", **settings, **changes))
        for changes in ({}, {name: value})
    ]
    assert observed == [without, with_value]
