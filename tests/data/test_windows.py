from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from littrainer.data.loaders import LookaheadLoader
from littrainer.data.position import ResumePoint
from littrainer.data.samplers import EpochSeededSampler
from littrainer.data.windows import MicroBatch, WindowLoader, count_label_tokens
from tests.data.test_loaders import Numbers


class Recorder:
    """What a WindowLoader asks for, in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def draw_window(self, batches: Iterator[Any], number: int) -> tuple[list[Any], int]:
        window = list(islice(batches, number))
        self.events.append(("drawn", *window))
        return window, 10 * len(window)

    def restore(self) -> None:
        self.events.append("restored")


def windows_over(loader: Any, accumulation: int, length: int, **keywords: Any) -> WindowLoader:
    settings = {"draw_window": Recorder().draw_window, "should_stop": lambda: False, **keywords}
    return WindowLoader(loader, accumulation=accumulation, micro_batches_per_epoch=length, **settings)


def places(micro_batches: list[MicroBatch]) -> str:
    """One letter for each micro-batch: [ opens its window, ] closes it, | does both, . neither."""
    letters = {(True, False): "[", (False, True): "]", (True, True): "|", (False, False): "."}
    return "".join(letters[batch.opens_window, batch.closes_window] for batch in micro_batches)


@pytest.mark.parametrize(
    ("accumulation", "length", "expected", "sizes"),
    [
        (1, 3, "|||", [1, 1, 1]),
        (2, 4, "[][]", [2, 2, 2, 2]),
        (3, 7, "[.][.]|", [3, 3, 3, 3, 3, 3, 1]),
        (3, 5, "[.][]", [3, 3, 3, 2, 2]),
        (4, 3, "[.]", [3, 3, 3]),
    ],
)
def test_an_epoch_is_cut_into_windows_of_which_the_last_may_be_shorter(
    accumulation: int, length: int, expected: str, sizes: list[int]
) -> None:
    micro_batches = list(windows_over(range(length), accumulation, length))
    assert places(micro_batches) == expected
    assert [batch.window_size for batch in micro_batches] == sizes
    assert [batch.inputs for batch in micro_batches] == list(range(length))
    assert [batch.epoch_fraction for batch in micro_batches] == [(n + 1) / length for n in range(length)]
    assert [batch.num_items_in_window for batch in micro_batches] == [10 * size for size in sizes]


def test_a_window_is_drawn_as_a_whole_before_its_first_micro_batch_is_handed_out() -> None:
    recorder = Recorder()
    handed_out = iter(windows_over(range(5), 2, 5, draw_window=recorder.draw_window))
    next(handed_out)
    assert recorder.events == [("drawn", 0, 1)]
    next(handed_out)
    assert recorder.events == [("drawn", 0, 1)]
    next(handed_out)
    assert recorder.events == [("drawn", 0, 1), ("drawn", 2, 3)]


def test_a_stream_that_ends_within_a_window_never_closes_it() -> None:
    loader = windows_over(iter(range(5)), accumulation=3, length=9)
    micro_batches = list(loader)
    assert places(micro_batches) == "[.][." and len(loader) == 9 and list(loader) == []
    assert [batch.window_size for batch in micro_batches] == [3, 3, 3, 2, 2]


@pytest.mark.parametrize(
    ("more", "drawn", "expected"),
    [(-1, [3, 3, 3, 3], "[..][..][..]"), (-2, [2, 2, 2, 2], "[..][..]"), (1, [5, 5, 5, 1], "[..][..][..][..]")],
)
def test_a_script_that_draws_more_or_fewer_is_asked_for_the_same_and_steps_are_counted_over_all(
    more: int, drawn: list[int], expected: str
) -> None:
    asked: list[int] = []

    def draw_window(batches: Iterator[Any], number: int) -> tuple[list[Any], int]:
        asked.append(number)
        return list(islice(batches, number + more)), 1

    loader = windows_over(range(16), 4, 16, draw_window=draw_window)
    micro_batches = list(loader)
    assert asked == [4, 4, 4, 4] and loader.epoch_is_complete
    assert [batch.window_size for batch in micro_batches if not batch.position] == drawn
    assert places(micro_batches) == expected


def test_an_epoch_that_is_resumed_within_a_window_closes_that_one_first() -> None:
    asked: list[int] = []

    def draw_window(batches: Iterator[Any], number: int) -> tuple[list[Any], int]:
        asked.append(number)
        return list(islice(batches, number)), 1

    loader = windows_over("abcdefgh", 3, 8, draw_window=draw_window)
    loader.resume_at(ResumePoint(1, None, nothing))
    assert places(list(loader)) == "[][.][]" and asked == [2, 3, 2]


def test_an_epoch_ends_in_the_middle_of_a_window_when_told_to_stop() -> None:
    answers = iter([False, True])
    loader = windows_over(range(6), 3, 6, should_stop=lambda: next(answers))
    assert places(list(loader)) == "[."
    assert loader.micro_batches_seen == 2


def shuffled(dataset: Numbers) -> LookaheadLoader:
    return LookaheadLoader(dataset, 2, collate_fn=list, sampler=EpochSeededSampler(dataset, data_seed=5))


def nothing() -> None:
    pass


def completeness(loader: WindowLoader) -> list[bool]:
    """Whether the epoch is complete, asked after each micro-batch has been trained on."""
    found = []
    for micro_batch in loader:
        if micro_batch.closes_window:
            loader.count_optimizer_step()
        found.append(loader.epoch_is_complete)
    return found


def test_an_epoch_is_complete_when_the_last_window_is_being_trained_on() -> None:
    loader = windows_over(range(5), 2, 5)
    assert completeness(loader) == [False, False, False, False, True]


def test_a_loader_that_looks_ahead_tells_that_a_stream_ends_with_this_window() -> None:
    loader = windows_over(shuffled(Numbers(8)), 2, 1000)
    assert completeness(loader) == [False, False, False, True]


def test_a_window_that_the_data_cannot_fill_leaves_the_epoch_incomplete_until_it_ends() -> None:
    loader = windows_over(shuffled(Numbers(6)), 2, 1000)
    assert completeness(loader) == [False, False, False]
    assert loader.epoch_is_complete and loader.micro_batches_done == 2


WINDOW = [
    {"labels": torch.tensor([[1, 2, -100], [-100, 3, 4]])},
    {"labels": torch.tensor([[5, -100, -100]])},
]
SHIFTED = [{"labels": torch.tensor([[1, 2, 3]]), "shift_labels": torch.tensor([[2, -100, -100]])}]


@pytest.mark.parametrize(
    ("window", "labels_are_shifted", "expected"),
    [
        (WINDOW, False, 5),
        # The first label of a row is no target.
        (WINDOW, True, 3),
        (SHIFTED, True, 1),
        *(([{"labels": labels}], False, None) for labels in ([{"boxes": [1]}], [1, 2], "text", None)),
    ],
)
def test_all_labels_but_ignored_ones_are_counted_over_the_window(
    window: Any, labels_are_shifted: bool, expected: int | None
) -> None:
    assert count_label_tokens(window, labels_are_shifted) == expected
