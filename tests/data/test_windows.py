from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from littrainer.data.resume.position import DataPosition
from littrainer.data.windows import MicroBatch, WindowLoader, count_label_tokens


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


def test_a_window_is_drawn_as_a_whole_before_its_first_micro_batch_is_handed_out() -> None:
    recorder = Recorder()
    handed_out = iter(windows_over(range(5), 2, 5, draw_window=recorder.draw_window))
    next(handed_out)
    assert recorder.events == [("drawn", 0, 1)]
    next(handed_out)
    assert recorder.events == [("drawn", 0, 1)]
    next(handed_out)
    assert recorder.events == [("drawn", 0, 1), ("drawn", 2, 3)]


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
    assert asked == [4, 4, 4, 4] and loader.is_epoch_complete
    assert [batch.window_size for batch in micro_batches if not batch.position] == drawn
    assert places(micro_batches) == expected


def test_an_epoch_that_is_resumed_within_a_window_closes_that_one_first() -> None:
    asked: list[int] = []

    def draw_window(batches: Iterator[Any], number: int) -> tuple[list[Any], int]:
        asked.append(number)
        return list(islice(batches, number)), 1

    loader = windows_over("abcdefgh", 3, 8, draw_window=draw_window)
    loader.progress.resume_at(DataPosition(0, 1), nothing)
    assert places(list(loader)) == "[][.][]" and asked == [2, 3, 2]


def nothing() -> None:
    pass


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


def test_the_sampler_of_a_plain_loader_gets_the_epoch() -> None:
    class Noting(torch.utils.data.SequentialSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    rows = [{"x": torch.zeros(1)}] * 4
    sampler = Noting(rows)
    batches = torch.utils.data.BatchSampler(sampler, 2, drop_last=False)
    for loader in (
        torch.utils.data.DataLoader(rows, batch_size=2, sampler=sampler),
        torch.utils.data.DataLoader(rows, batch_sampler=batches),
        torch.utils.data.DataLoader(rows, batch_size=None, sampler=sampler),
    ):
        windows = windows_over(loader, 1, len(loader))
        windows.start_epoch(3)
        list(windows)
    assert sampler.epochs == [3, 3, 3]
