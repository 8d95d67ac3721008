from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from littrainer.data.resume.position import DataPosition
from littrainer.data.windows import MicroBatch, WindowLoader, count_label_tokens


class Recorder:
    """Record of drawn windows."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def draw_window(self, batches: Iterator[Any], number: int) -> tuple[list[Any], int]:
        window = list(islice(batches, number))
        self.events.append(("drawn", *window))
        return window, 10 * len(window)


def windows_over(loader: Any, accumulation: int, length: int, **keywords: Any) -> WindowLoader:
    settings = {"draw_window": Recorder().draw_window, "should_stop": lambda: False, **keywords}
    return WindowLoader(loader, accumulation=accumulation, micro_batches_per_epoch=length, **settings)


def describe_windows(micro_batches: list[MicroBatch]) -> str:
    """Return a letter for each micro-batch: [ opens its window, ] closes it, | does both, . neither."""
    letters = {(True, False): "[", (False, True): "]", (True, True): "|", (False, False): "."}
    return "".join(letters[batch.is_first_of_step, batch.is_last_of_step] for batch in micro_batches)


def test_a_window_is_drawn_before_its_first_micro_batch_is_yielded() -> None:
    recorder = Recorder()
    micro_batches = iter(windows_over(range(5), 2, 5, draw_window=recorder.draw_window))
    next(micro_batches)
    assert recorder.events == [("drawn", 0, 1)]
    next(micro_batches)
    assert recorder.events == [("drawn", 0, 1)]
    next(micro_batches)
    assert recorder.events == [("drawn", 0, 1), ("drawn", 2, 3)]


@pytest.mark.parametrize(
    ("more", "drawn", "expected"),
    [(-1, [3, 3, 3, 3], "[..][..][..]"), (-2, [2, 2, 2, 2], "[..][..]"), (1, [5, 5, 5, 1], "[..][..][..][..]")],
)
def test_steps_are_counted_over_all_micro_batches_if_a_script_draws_more_or_fewer(
    more: int, drawn: list[int], expected: str
) -> None:
    numbers: list[int] = []

    def draw_window(batches: Iterator[Any], number: int) -> tuple[list[Any], int]:
        numbers.append(number)
        return list(islice(batches, number + more)), 1

    loader = windows_over(range(16), 4, 16, draw_window=draw_window)
    micro_batches = list(loader)
    assert numbers == [4, 4, 4, 4] and loader.is_epoch_complete
    assert [batch.window_size for batch in micro_batches if not batch.position] == drawn
    assert describe_windows(micro_batches) == expected


def test_an_epoch_that_resumes_within_a_window_closes_it_first() -> None:
    numbers: list[int] = []

    def draw_window(batches: Iterator[Any], number: int) -> tuple[list[Any], int]:
        numbers.append(number)
        return list(islice(batches, number)), 1

    loader = windows_over("abcdefgh", 3, 8, draw_window=draw_window)
    loader.progress.resume_at(DataPosition(0, 1))
    assert describe_windows(list(loader)) == "[][.][]" and numbers == [2, 3, 2]


WINDOW = [
    {"labels": torch.tensor([[1, 2, -100], [-100, 3, 4]])},
    {"labels": torch.tensor([[5, -100, -100]])},
]
SHIFTED = [{"labels": torch.tensor([[1, 2, 3]]), "shift_labels": torch.tensor([[2, -100, -100]])}]


@pytest.mark.parametrize(
    ("window", "loss_shifts_labels", "expected"),
    [
        (WINDOW, False, 5),
        # The first label of a row is no target.
        (WINDOW, True, 3),
        (SHIFTED, True, 1),
        *(([{"labels": labels}], False, None) for labels in ([{"boxes": [1]}], [1, 2], "text", None)),
    ],
)
def test_labels_of_a_window_are_counted_without_ignored_labels(
    window: Any, loss_shifts_labels: bool, expected: int | None
) -> None:
    assert count_label_tokens(window, loss_shifts_labels) == expected


def test_the_sampler_of_a_plain_loader_gets_the_epoch() -> None:
    class RecordingSampler(torch.utils.data.SequentialSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    rows = [{"x": torch.zeros(1)}] * 4
    sampler = RecordingSampler(rows)
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
