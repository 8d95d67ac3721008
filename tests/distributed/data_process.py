"""Data in two processes: `python -m tests.distributed.data_process FOLDER`."""

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
from littrainer.distributed.failures import PeerFailedError
from tests.data.test_packing import tokens_read
from tests.data.test_token_batches import WithWidths
from tests.distributed.checks import Check, run_checks
from tests.loop.exact_resume import ShuffledStream, StreamWithState, differences_after_resuming, noisy_trainer
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import AugmentedRows, Rows, Stream, language_rows, token_rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_llama
from tests.scenarios.other_processes import MAX_WAIT_SECONDS, end_process, process_group
from tests.scenarios.trainers import quiet_arguments, quiet_trainer, warnings_logged

SIZE = 2
# Timeout of exchanges.
MAX_WAIT = timedelta(seconds=MAX_WAIT_SECONDS)
RANK = int(os.environ.get("RANK", "0"))

# ---- Resuming --------------------------------------------------------------------------------------------------------

NOT_DISPATCHED = {"accelerator_config": {"dispatch_batches": False}}

# Name -> data, changes of the arguments, and steps of the checkpoints to resume. Each process gets two full batches of
# 21 rows, and a third batch that is filled up.
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


def check_resuming(name: str) -> Check:
    make, changes, steps = RESUMED[name]

    def check(folder: Path) -> None:
        assert differences_after_resuming(folder, lambda: noisy_trainer(folder, make(), **changes), *steps) == {}

    check.__name__ = f"check_resuming {name}"
    return check


# ---- Ends ------------------------------------------------------------------------------------------------------------


def make_trainer(folder: Path, data: Any, **changes: Any) -> Any:
    return quiet_trainer(folder, VectorClassifier(), trainer_kwargs={"train_dataset": data}, **changes)


def unequal_data_is_refused_in_all_processes_with_ranks_and_lengths(folder: Path) -> None:
    message = "rank 0 has 3 batches, rank 1 has 2 batches; rank 0 has 24, rank 1 has 12"
    with pytest.raises(UnequalData, match=message):
        make_trainer(folder, Rows(vector_rows(24 - 12 * RANK))).train()
    with pytest.raises(UnequalData, match=r"rank 0 has 2 batches, rank 1 has 1 batch\. Set even_batches=True"):
        make_trainer(folder, Rows(vector_rows(10)), accelerator_config={"even_batches": False}).train()


def training_ends_unequal_streams_at_the_shortest_and_evaluation_refuses_them(folder: Path) -> None:
    """Each process reads a different stream; the second stream is shorter."""
    rows = vector_rows(16 - 8 * RANK)
    sharding = make_trainer(folder / "one", Stream(rows), max_steps=6, **NOT_DISPATCHED)
    custom = quiet_trainer(folder / "two", VectorClassifier(), max_steps=6)
    custom.get_train_dataloader = lambda: DataLoader(Stream(rows), batch_size=4)  # type: ignore[method-assign]
    with warnings_logged("") as texts:
        epochs = []
        for trainer in (sharding, custom):
            trainer.train()
            epochs.append((trainer.state.global_step, trainer.state.epoch))
    # The eight rows of the shorter stream are a single batch if the Trainer shards them, and two in a custom loader.
    assert epochs == [(6, pytest.approx(5 + 1 / 6)), (6, pytest.approx(2 + 2 / 6))]
    messages = [f"The data of rank 1 has ended after {batches}" for batches in ("1 batch", "2 batches")]
    assert [text.partition(",")[0] for text in texts if "has ended" in text] == messages
    with pytest.raises(UnequalData, match=rf"^{messages[0]}[\s\S]*dispatch_batches=True"):
        sharding.evaluate(Stream(vector_rows(12 - 8 * RANK, seed=1)))


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


def only_the_first_process_reads_a_stream(folder: Path) -> None:
    CountedStream.rows_read = 0
    make_trainer(folder, CountedStream(vector_rows(16)), max_steps=2).train()
    assert CountedStream.rows_read == (0 if RANK else 16)


def an_error_of_the_stream_ends_all_processes(folder: Path) -> None:
    message = "^Process 0.*OSError: shard 3 is gone" if RANK else "^shard 3 is gone"
    with pytest.raises(PeerFailedError if RANK else OSError, match=message):
        make_trainer(folder, FailingStream(vector_rows(32)), max_steps=4).train()


def batches_of_unequal_widths_are_dispatched(folder: Path) -> None:
    loader = build_loader(
        quiet_arguments(folder),
        Stream(token_rows(16)),
        collate=pad_tokens,
        batch_size=2,
        sampler=None,
        is_training=True,
    )
    first, second = all_gather_object([tuple(batch["input_ids"].shape) for batch in loader])
    assert len(first) == len(second) == 4 and first != second


def predictions_of_a_stream_that_all_processes_read_have_no_repeated_samples(folder: Path) -> None:
    # The last global batch has two of seven rows.
    rows = vector_rows(7, seed=1)
    trainer = quiet_trainer(folder, VectorClassifier(), **NOT_DISPATCHED)
    for kind in (Stream, SizedStream):
        assert trainer.predict(kind(rows)).label_ids.tolist() == [row["labels"] for row in rows]
    assert trainer.evaluation_loop(trainer.get_eval_dataloader(SizedStream(rows)), "Evaluation").num_samples == 7


def all_processes_have_equally_many_batches_by_tokens_with_each_sample_once(folder: Path) -> None:
    loader = make_trainer(folder, WithWidths(vector_rows(23)), max_tokens_per_batch=15).get_train_dataloader()
    batches_by_rank = all_gather_object(list(loader.batch_sampler))
    assert len(batches_by_rank[0]) == len(batches_by_rank[1]) == len(loader)
    assert sorted(index for batches in batches_by_rank for batch in batches for index in batch) == list(range(23))


def packing_for_all_processes_loses_no_document(folder: Path) -> None:
    rows = language_rows(60)
    expected = sorted(tuple(row["input_ids"]) for row in rows)
    for name, kind, changes in (
        ("rows", Rows, {}),
        ("rows dispatched", Rows, {"accelerator_config": {"dispatch_batches": True}}),
        ("a stream dispatched", Stream, {"max_steps": 4}),
        ("a stream read by each", Stream, {"max_steps": 4, **NOT_DISPATCHED}),
        ("rows for a sharded model", Rows, {"fsdp": True, "fsdp_config": {"version": 2}}),
    ):
        keywords = {"train_dataset": kind(rows), "data_collator": pad_tokens}
        settings = {"pack_to_length": 24, "per_device_train_batch_size": 3, **changes}
        trainer = quiet_trainer(folder / name, tiny_llama(), trainer_kwargs=keywords, **settings)
        shards = all_gather_object(tokens_read(trainer.get_train_dataloader()))
        documents = [document for shard in shards for document in shard]
        # The last global batch is filled up with rows of the first.
        assert set(documents) == set(expected) and len(documents) < 1.3 * len(expected), name
        trainer.train()
        assert trainer.state.global_step == trainer.state.max_steps


class NumberStream(IterableDataset[int]):
    """Numbers from a random start; with `set_epoch`, so that the Trainer does not seed its generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(50 + RANK)

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        start = int(torch.randint(1000, (), generator=self.generator))
        return iter(range(start, start + 8))


def all_processes_use_the_same_order_of_a_stream_with_different_generators(folder: Path) -> None:
    args = quiet_arguments(folder, **NOT_DISPATCHED)
    loader = build_loader(args, NumberStream(), sampler=None, collate=list, batch_size=2, is_training=False)
    for _ in range(2):
        first, second = all_gather_object([int(number) for batch in loader for number in batch])
        assert sorted(first + second) == list(range(first[0], first[0] + 8))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.rows)


CHECKS = (
    *map(check_resuming, RESUMED),
    unequal_data_is_refused_in_all_processes_with_ranks_and_lengths,
    training_ends_unequal_streams_at_the_shortest_and_evaluation_refuses_them,
    only_the_first_process_reads_a_stream,
    an_error_of_the_stream_ends_all_processes,
    batches_of_unequal_widths_are_dispatched,
    predictions_of_a_stream_that_all_processes_read_have_no_repeated_samples,
    all_processes_use_the_same_order_of_a_stream_with_different_generators,
    all_processes_have_equally_many_batches_by_tokens_with_each_sample_once,
    packing_for_all_processes_loses_no_document,
)


def group(meeting_place: Path) -> AbstractContextManager[None]:
    return process_group(meeting_place, RANK, SIZE, MAX_WAIT)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_checks(CHECKS, Path(sys.argv[1]), within=group)
    end_process()
