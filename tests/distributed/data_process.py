"""One of two processes that share data: `python -m tests.distributed.data_process FOLDER`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from littrainer.data.loaders import build_loader
from littrainer.data.stream_end import UnequalData
from littrainer.distributed.collectives import all_gather_object
from littrainer.distributed.failures import FailedElsewhere
from tests.data.test_packing import tokens_read
from tests.data.test_token_batches import WithWidths
from tests.distributed.checks import Check, run_checks
from tests.loop.exact_resume import ShuffledStream, StreamWithState, differences_after_resuming, noisy_trainer
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import AugmentedRows, Rows, Stream, language_rows, token_rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_llama
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS, end_process, process_group
from tests.scenarios.trainers import quiet_arguments, quiet_trainer, warnings_logged

SIZE = 2
# A check that lets one process wait for the other fails by then.
MAX_WAIT = timedelta(seconds=LONGEST_WAIT_SECONDS)
RANK = int(os.environ.get("RANK", "0"))

# ---- Resuming --------------------------------------------------------------------------------------------------------

NOT_DISPATCHED = {"accelerator_config": {"dispatch_batches": False}}

# Name -> data, changes of the arguments, and steps whose checkpoints are resumed from. Of 21 rows each process gets two
# full batches, and a third one that is filled up.
RESUMED: dict[str, tuple[Callable[[], Any], dict[str, Any], tuple[int, ...]]] = {
    "rows": (lambda: AugmentedRows(vector_rows(21)), {}, (1, 3)),
    "rows read by workers": (lambda: AugmentedRows(vector_rows(21)), {"dataloader_num_workers": 2}, (4,)),
    "batches by tokens": (
        lambda: WithWidths(vector_rows(21)),
        {"max_tokens_per_batch": 15, "gradient_accumulation_steps": 2},
        (1, 3),
    ),
    "a stream dispatched": (lambda: ShuffledStream(vector_rows(21)), {"max_steps": 5}, (1, 4)),
    "a stream with a state dispatched": (lambda: StreamWithState(vector_rows(21)), {"max_steps": 5}, (2,)),
    "a stream read by each": (lambda: ShuffledStream(vector_rows(21)), {"max_steps": 5, **NOT_DISPATCHED}, (1, 4)),
}


def resumed(name: str) -> Check:
    make, changes, steps = RESUMED[name]

    def check(folder: Path) -> None:
        assert differences_after_resuming(folder, lambda: noisy_trainer(folder, make(), **changes), *steps) == {}

    check.__name__ = f"resumed {name}"
    return check


# ---- Ends ------------------------------------------------------------------------------------------------------------


def training_on(folder: Path, data: Any, **changes: Any) -> Any:
    return quiet_trainer(folder, VectorClassifier(), given={"train_dataset": data}, **changes)


def data_that_is_shorter_in_one_process_is_refused_in_all_with_ranks_and_lengths(folder: Path) -> None:
    words = "rank 0 has 3 batches, rank 1 has 2 batches; rank 0 has 24, rank 1 has 12"
    with pytest.raises(UnequalData, match=words):
        training_on(folder, Rows(vector_rows(24 - 12 * RANK))).train()
    with pytest.raises(UnequalData, match=r"rank 0 has 2 batches, rank 1 has 1 batch\. Set even_batches=True"):
        training_on(folder, Rows(vector_rows(10)), accelerator_config={"even_batches": False}).train()


def streams_of_unequal_length_end_together_in_training_and_are_not_evaluated(folder: Path) -> None:
    """Each process reads another stream; the second one's is shorter."""
    rows = vector_rows(16 - 8 * RANK)
    of_trainer = training_on(folder / "one", Stream(rows), max_steps=6, **NOT_DISPATCHED)
    of_script = quiet_trainer(folder / "two", VectorClassifier(), max_steps=6)
    of_script.get_train_dataloader = lambda: DataLoader(Stream(rows), batch_size=4)  # type: ignore[method-assign]
    with warnings_logged("") as texts:
        epochs = []
        for trainer in (of_trainer, of_script):
            trainer.train()
            epochs.append((trainer.state.global_step, trainer.state.epoch))
    # Eight rows of the shorter one are one batch where the Trainer shares them, and two in a loader of the script.
    assert epochs == [(6, pytest.approx(5 + 1 / 6)), (6, pytest.approx(2 + 2 / 6))]
    ended = [f"The data of rank 1 has ended after {batches}" for batches in ("1 batch", "2 batches")]
    assert [text.partition(",")[0] for text in texts if "has ended" in text] == ended
    with pytest.raises(UnequalData, match=rf"^{ended[0]}[\s\S]*dispatch_batches=True"):
        of_trainer.evaluate(Stream(vector_rows(12 - 8 * RANK, seed=1)))


# ---- Reading ---------------------------------------------------------------------------------------------------------


class CountedStream(Stream):
    rows_read = 0

    def __iter__(self) -> Iterator[Any]:
        for row in super().__iter__():
            CountedStream.rows_read += 1
            yield row


class FailingStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield from self.rows[:9]
        raise OSError("shard 3 is gone")


def a_stream_is_read_by_the_first_process_alone(folder: Path) -> None:
    CountedStream.rows_read = 0
    training_on(folder, CountedStream(vector_rows(16)), max_steps=2).train()
    assert CountedStream.rows_read == (0 if RANK else 16)


def an_error_of_the_stream_ends_all_processes(folder: Path) -> None:
    words = "^Process 0.*OSError: shard 3 is gone" if RANK else "^shard 3 is gone"
    with pytest.raises(FailedElsewhere if RANK else OSError, match=words):
        training_on(folder, FailingStream(vector_rows(32)), max_steps=4).train()


def batches_that_are_padded_to_unequal_widths_are_dispatched(folder: Path) -> None:
    loader = build_loader(
        quiet_arguments(folder),
        Stream(token_rows(16)),
        collate=pad_tokens,
        batch_size=2,
        sampler=None,
        is_training=True,
    )
    one, other = all_gather_object([tuple(batch["input_ids"].shape) for batch in loader])
    assert len(one) == len(other) == 4 and one != other


def a_stream_that_each_process_reads_is_predicted_without_repeated_samples(folder: Path) -> None:
    # Of seven rows the last round lacks five.
    rows = vector_rows(7, seed=1)
    trainer = quiet_trainer(folder, VectorClassifier(), **NOT_DISPATCHED)
    for kind in (Stream, SizedStream):
        assert trainer.predict(kind(rows)).label_ids.tolist() == [row["labels"] for row in rows]
    assert trainer.evaluation_loop(trainer.get_eval_dataloader(SizedStream(rows)), "Evaluation").num_samples == 7


def batches_by_tokens_are_as_many_in_each_process_and_hold_each_sample_once(folder: Path) -> None:
    loader = training_on(folder, WithWidths(vector_rows(23)), max_tokens_per_batch=15).get_train_dataloader()
    read = all_gather_object(list(loader.batch_sampler))
    assert len(read[0]) == len(read[1]) == len(loader)
    assert sorted(place for batches in read for batch in batches for place in batch) == list(range(23))


def documents_are_packed_for_all_processes_and_none_is_lost(folder: Path) -> None:
    rows = language_rows(60)
    expected = sorted(tuple(row["input_ids"]) for row in rows)
    for name, kind, changes in (
        ("rows", Rows, {}),
        ("rows dispatched", Rows, {"accelerator_config": {"dispatch_batches": True}}),
        ("a stream dispatched", Stream, {"max_steps": 4}),
        ("a stream read by each", Stream, {"max_steps": 4, **NOT_DISPATCHED}),
        ("rows for a sharded model", Rows, {"fsdp": True, "fsdp_config": {"version": 2}}),
    ):
        given = {"train_dataset": kind(rows), "data_collator": pad_tokens}
        settings = {"pack_to_length": 24, "per_device_train_batch_size": 3, **changes}
        trainer = quiet_trainer(folder / name, tiny_llama(), given=given, **settings)
        found = [
            document for part in all_gather_object(tokens_read(trainer.get_train_dataloader())) for document in part
        ]
        # A last round that is not full is filled up with rows of the first.
        assert set(found) == set(expected) and len(found) < 1.3 * len(expected), name
        trainer.train()
        assert trainer.state.global_step == trainer.state.max_steps


class NumberStream(IterableDataset[int]):
    """Numbers from a place that a generator draws; told its epochs, so that nobody seeds the generator for it."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(50 + RANK)

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        start = int(torch.randint(1000, (), generator=self.generator))
        return iter(range(start, start + 8))


def a_stream_has_one_order_though_the_generators_of_the_processes_differ(folder: Path) -> None:
    args = quiet_arguments(folder, **NOT_DISPATCHED)
    loader = build_loader(args, NumberStream(), sampler=None, collate=list, batch_size=2, is_training=False)
    for _ in range(2):
        one, other = all_gather_object([int(number) for batch in loader for number in batch])
        assert sorted(one + other) == list(range(one[0], one[0] + 8))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.rows)


CHECKS = (
    *map(resumed, RESUMED),
    data_that_is_shorter_in_one_process_is_refused_in_all_with_ranks_and_lengths,
    streams_of_unequal_length_end_together_in_training_and_are_not_evaluated,
    a_stream_is_read_by_the_first_process_alone,
    an_error_of_the_stream_ends_all_processes,
    batches_that_are_padded_to_unequal_widths_are_dispatched,
    a_stream_that_each_process_reads_is_predicted_without_repeated_samples,
    a_stream_has_one_order_though_the_generators_of_the_processes_differ,
    batches_by_tokens_are_as_many_in_each_process_and_hold_each_sample_once,
    documents_are_packed_for_all_processes_and_none_is_lost,
)


def group(meeting_place: Path) -> AbstractContextManager[None]:
    return process_group(meeting_place, RANK, SIZE, MAX_WAIT)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_checks(CHECKS, Path(sys.argv[1]), within=group)
    end_process()
