from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from littrainer.data.position import ExactStreamState, loads_safely
from tests.data.test_loaders import Numbers
from tests.scenarios.data import Stream


class Tells(IterableDataset[Any]):
    def __init__(self, state: Any = 3) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state

    def __iter__(self) -> Any:
        return iter(())


def test_a_stream_is_asked_where_it_stands_and_told_where_to_go_on() -> None:
    stream = Tells()
    state = ExactStreamState.of(DataLoader(stream))
    assert state is not None and state.save() == 3
    state.dataset.load_state_dict(8)
    assert stream.state == 8


@pytest.mark.parametrize(
    "loader",
    [DataLoader(Stream([])), DataLoader(Tells(), num_workers=1), DataLoader(Numbers(3)), [1, 2]],
    ids=["tells nothing", "read by workers", "no stream", "no loader"],
)
def test_other_data_has_no_state_that_tells_everything(loader: Any) -> None:
    assert ExactStreamState.of(loader) is None


def test_a_state_that_a_checkpoint_cannot_hold_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    state = ExactStreamState.of(DataLoader(Tells(state={"callback": print})))
    assert state is not None and state.save() is None and state.save() is None
    assert caplog.text.count("Tells.state_dict() holds objects that no checkpoint stores") == 1


@pytest.mark.parametrize(("value", "safe"), [({"a": [1, "b", None]}, True), (object(), False), (lambda: 0, False)])
def test_only_plain_values_are_stored(value: Any, safe: bool) -> None:
    assert loads_safely(value) is safe


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_shuffle_buffer_anywhere_in_a_streamed_dataset_holds_samples_back(shuffled: bool) -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"x": [1, 2, 3]}).to_iterable_dataset()
    rows = rows.shuffle(buffer_size=2) if shuffled else rows
    loader = DataLoader(rows.map(lambda row: row).filter(lambda row: True))
    assert (ExactStreamState.of(loader) is None) is shuffled
