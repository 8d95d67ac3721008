from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from transformers import BatchEncoding, BatchFeature

from littrainer.data.loaders import DeviceCopies, LookaheadLoader, copies_to, copy_stream
from tests.data.test_loaders import Numbers, numbered_stream
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.trainers import quiet_trainer

ELSEWHERE = torch.device("meta")
"""A device that every machine has and that is not the host."""

GPU = torch.device("cuda", 0)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    """What is done with the streams of a GPU that is not there, in order."""
    noted: list[str] = []
    within: list[str] = []

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            noted.append(f"host waits for copy {self.number}")

    class Stream:
        def __init__(self, device: Any = None, name: str = "side stream") -> None:
            self.name, self.copies = name, 0
            if name == "side stream":
                noted.append("stream made")

        def record_event(self) -> Event:
            self.copies += 1
            return Event(self.copies - 1)

        def wait_event(self, event: Event) -> None:
            noted.append(f"{self.name} waits for copy {event.number}")

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        within.append(stream.name)
        yield
        within.pop()

    def moved(tensor: torch.Tensor, device: Any, non_blocking: bool = False) -> torch.Tensor:
        if within:
            noted.append(f"{int(tensor[0])} copied in {within[-1]}, {non_blocking=}")
        return tensor

    copy_stream.cache_clear()
    request.addfinalizer(copy_stream.cache_clear)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(name="computation"))
    monkeypatch.setattr(torch.Tensor, "to", moved)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: noted.append(f"{int(tensor[0])} kept for {stream.name}")
    )
    return noted


def read(non_blocking: bool, events: list[str], count: int = 3) -> list[Any]:
    def collate(samples: list[int]) -> dict[str, torch.Tensor]:
        events.append(f"{samples[0]} collated")
        return {"x": torch.tensor(samples)}

    loader = LookaheadLoader(Numbers(count), 1, collate_fn=collate)
    loader.copies = DeviceCopies(GPU, non_blocking)
    handed_out = []
    for batch in loader:
        events.append("step")
        handed_out.append(batch)
    return handed_out


def test_the_next_batch_is_on_its_way_when_one_is_handed_out(events: list[str]) -> None:
    batches = read(non_blocking=True, events=events)
    assert [batch["x"].tolist() for batch in batches] == [[0], [1], [2]]
    assert [event for event in events if event != "stream made"] == [
        *("0 collated", "0 copied in side stream, non_blocking=True"),
        *("1 collated", "1 copied in side stream, non_blocking=True"),
        *("computation waits for copy 0", "0 kept for computation", "step"),
        *("2 collated", "2 copied in side stream, non_blocking=True"),
        *("computation waits for copy 1", "1 kept for computation", "step"),
        *("computation waits for copy 2", "2 kept for computation", "step"),
    ]


def test_host_memory_is_filled_anew_only_when_it_has_been_read_unless_copies_are_not_waited_for(
    events: list[str],
) -> None:
    read(non_blocking=False, events=events)
    before_collating = [
        events[place - 1] for place, event in enumerate(events) if event in ("1 collated", "2 collated")
    ]
    assert before_collating == ["host waits for copy 0", "host waits for copy 1"]
    # Nothing is waited for between the copy and the step.
    assert events[events.index("1 collated") :][:4] == [
        *("1 collated", "1 copied in side stream, non_blocking=True"),
        *("computation waits for copy 0", "0 kept for computation"),
    ]


def test_all_passes_over_all_loaders_share_a_stream_of_each_device(events: list[str]) -> None:
    for _ in range(4):
        read(non_blocking=False, events=events)
    assert events.count("stream made") == 1
    list(DeviceCopies(torch.device("cuda", 1)).begun(iter([torch.ones(1)])))
    assert events.count("stream made") == 2


class MovesItself:
    """An object that a collator may make, as libraries for graphs do; its method takes the device alone."""

    def __init__(self, place: str = "host") -> None:
        self.place = place

    def to(self, device: Any) -> MovesItself:
        return MovesItself(str(device))


Pair = namedtuple("Pair", ["first", "second"])


def test_whatever_a_batch_is_made_of_is_moved() -> None:
    x = torch.ones(2)
    batch = {
        "list": [x, (x, 3)],
        "pair": Pair(x, None),
        "nested": UserDict({"x": x}),
        "own": MovesItself(),
        "text": "a",
    }
    moved = DeviceCopies(ELSEWHERE).on_device(batch)
    tensors = [moved["list"][0], moved["list"][1][0], moved["pair"].first, moved["nested"]["x"]]
    assert [tensor.device for tensor in tensors] == [ELSEWHERE] * 4
    assert type(moved["pair"]) is Pair and type(moved["nested"]) is UserDict
    assert moved["own"].place == "meta" and moved["text"] == "a" and moved["list"][1][1] == 3
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
    assert DeviceCopies(torch.device("cpu")).on_device(packed).batch_sizes.tolist() == [2, 1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_another_stream_cannot_carry_is_copied_when_it_is_needed(events: list[str]) -> None:
    own, nested = MovesItself(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    batch = {"sparse": torch.ones(2).to_sparse(), "nested": nested, "own": own, "mapping": OwnMapping(x=torch.ones(1))}
    (copy,) = DeviceCopies(GPU).begun(iter([batch]))
    assert copy.batch["own"] is own and not any("copied" in event for event in events)
    assert copy.arrived()["own"].place == "cuda:0"


class OwnMapping(UserDict[str, Any]):
    """Keeps more than its items, and moves them itself."""

    extra: str

    def to(self, device: Any, **_: Any) -> OwnMapping:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


def test_a_mapping_that_moves_itself_does_so_as_under_accelerate() -> None:
    moved = []
    for move in (DeviceCopies(ELSEWHERE).on_device, partial(send_to_device, device=ELSEWHERE)):
        batch = OwnMapping(x=torch.ones(1), y=torch.ones(2))
        batch.extra = "kept"
        found = move({"own": batch})["own"]
        moved.append((type(found), found.extra, found is batch, found["y"].device))
    assert moved[0] == moved[1]


@pytest.mark.parametrize("kind", [BatchEncoding, BatchFeature])
def test_batches_of_transformers_are_on_their_way_early_and_stay_what_they_are(events: list[str], kind: Any) -> None:
    batch = kind({"x": torch.ones(1), "texts": ["a"]})
    batch.extra = "kept"
    (copy,) = DeviceCopies(GPU).begun(iter([batch]))
    assert [event for event in events if "copied" in event] == ["1 copied in side stream, non_blocking=True"]
    arrived = copy.arrived()
    assert arrived is batch and arrived["texts"] == ["a"]
    assert "1 kept for computation" in events


@pytest.mark.parametrize("dataset", [Numbers(5), numbered_stream(5)])
def test_batches_of_a_loader_lie_on_the_device_and_are_counted(dataset: Any) -> None:
    def collate(samples: list[Any]) -> torch.Tensor:
        return torch.zeros(len(samples))

    loader = LookaheadLoader(dataset, 2, collate_fn=collate)
    loader.copies = DeviceCopies(ELSEWHERE)
    assert [(batch.device, len(batch)) for batch in loader] == [(ELSEWHERE, 2), (ELSEWHERE, 2), (ELSEWHERE, 1)]
    assert loader.rows_in_last_batch == 1


@pytest.mark.parametrize("non_blocking", [True, False])
def test_all_loaders_of_a_trainer_and_prepared_ones_hand_out_batches_on_its_device(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, non_blocking: bool
) -> None:
    trainer = quiet_trainer(tmp_path, accelerator_config={"non_blocking": non_blocking})
    monkeypatch.setattr(type(trainer.args), "device", ELSEWHERE)
    own: Any = torch.utils.data.DataLoader(Rows(vector_rows(4)), 2)
    loaders: list[Any] = [
        trainer.get_train_dataloader(),
        trainer.get_eval_dataloader(),
        trainer.get_test_dataloader(Rows(vector_rows(3))),
        trainer.accelerator.prepare(own),
    ]
    assert copies_to(torch.device("cpu"), trainer.args.accelerator_config) is None
    assert {loader.copies for loader in loaders} == {DeviceCopies(ELSEWHERE, non_blocking)}
    assert {next(iter(loader))["x"].device for loader in loaders} == {ELSEWHERE}
    assert trainer.accelerator.prepare_data_loader(own, device_placement=False).copies is None

    class OwnClass(torch.utils.data.DataLoader[Any]):
        pass

    # Documented in the table of the accelerator's members; `_prepare_inputs` moves these batches.
    left = trainer.accelerator.prepare(OwnClass(Rows(vector_rows(4)), 2))
    assert type(left) is OwnClass and next(iter(left))["x"].device.type == "cpu"
