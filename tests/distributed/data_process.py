"""One of two processes that share data: `python -m tests.distributed.data_process FOLDER`.

Each writes what its checks found to `FOLDER/RANK.pickle`.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from littrainer.data.loaders import build_loader
from tests.distributed.saving_process import warnings_noted
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import AugmentedRows, Rows, Stream, token_rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS, end_process, process_group
from tests.scenarios.trainers import quiet_arguments, quiet_trainer
from tests.training.exact_resume import ShuffledStream, StreamWithState, differences_after_resuming, noisy_trainer

SIZE = 2
# A check that lets one process wait for the other fails by then.
LONGEST_WAIT = timedelta(seconds=LONGEST_WAIT_SECONDS)
RANK = int(os.environ.get("RANK", "0"))

Check = Callable[[Path], Any]


# ---- Resuming --------------------------------------------------------------------------------------------------------

NOT_DISPATCHED = {"accelerator_config": {"dispatch_batches": False}}

# Name -> data, changes of the arguments, and steps whose checkpoints are resumed from. Of 21 rows each process gets two
# full batches, and a third one that is filled up.
RESUMED: dict[str, tuple[Callable[[], Any], dict[str, Any], tuple[int, ...]]] = {
    "rows": (lambda: AugmentedRows(vector_rows(21)), {}, (1, 3)),
    "rows read by workers": (lambda: AugmentedRows(vector_rows(21)), {"dataloader_num_workers": 2}, (4,)),
    "a stream dispatched": (lambda: ShuffledStream(vector_rows(21)), {"max_steps": 5}, (1, 4)),
    "a stream with a state dispatched": (lambda: StreamWithState(vector_rows(21)), {"max_steps": 5}, (2,)),
    "a stream read by each": (lambda: ShuffledStream(vector_rows(21)), {"max_steps": 5, **NOT_DISPATCHED}, (1, 4)),
}


def resumed(name: str) -> Check:
    make, changes, steps = RESUMED[name]

    def check(folder: Path) -> Any:
        return differences_after_resuming(folder, lambda: noisy_trainer(folder, make(), **changes), *steps)

    return check


# ---- Ends ------------------------------------------------------------------------------------------------------------


def message_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def a_shorter_dataset(folder: Path) -> str:
    trainer = quiet_trainer(folder, VectorClassifier(), given={"train_dataset": Rows(vector_rows(24 - 12 * RANK))})
    return message_of(trainer.train)


def uneven_batches(folder: Path) -> str:
    data = Rows(vector_rows(10))
    trainer = quiet_trainer(
        folder, VectorClassifier(), given={"train_dataset": data}, accelerator_config={"even_batches": False}
    )
    return message_of(trainer.train)


def streams_that_end_apart(folder: Path) -> Any:
    """Each process reads a stream of its own; the second one's is shorter."""
    rows = vector_rows(16 - 8 * RANK)
    of_trainer = quiet_trainer(
        folder / "one", VectorClassifier(), given={"train_dataset": Stream(rows)}, max_steps=6, **NOT_DISPATCHED
    )
    of_script = quiet_trainer(folder / "two", VectorClassifier(), max_steps=6)
    of_script.get_train_dataloader = lambda: DataLoader(Stream(rows), batch_size=4)  # type: ignore[method-assign]
    with warnings_noted() as texts:
        epochs = []
        for trainer in (of_trainer, of_script):
            trainer.train()
            epochs.append((trainer.state.global_step, trainer.state.epoch))
    evaluated = message_of(lambda: of_trainer.evaluate(Stream(vector_rows(12 - 8 * RANK, seed=1))))
    return {"epochs": epochs, "heard": [text for text in texts if "has ended" in text], "evaluated": evaluated}


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


def rows_read_of_a_stream(folder: Path) -> int:
    CountedStream.rows_read = 0
    data = CountedStream(vector_rows(16))
    quiet_trainer(folder, VectorClassifier(), given={"train_dataset": data}, max_steps=2).train()
    return CountedStream.rows_read


def a_stream_that_fails(folder: Path) -> str:
    data = FailingStream(vector_rows(32))
    return message_of(quiet_trainer(folder, VectorClassifier(), given={"train_dataset": data}, max_steps=4).train)


def batches_of_unequal_width(folder: Path) -> list[Any]:
    """Token ids padded batch by batch, dispatched."""
    loader = build_loader(
        quiet_arguments(folder),
        Stream(token_rows(16)),
        collate=pad_tokens,
        batch_size=2,
        sampler=None,
        is_training=True,
    )
    return [tuple(batch["input_ids"].shape) for batch in loader]


def streams_predicted_by_each(folder: Path) -> Any:
    """Seven rows that each process reads, of which the last round lacks five."""
    trainer = quiet_trainer(folder, VectorClassifier(), accelerator_config={"dispatch_batches": False})
    found = []
    for kind in (Stream, SizedStream):
        output = trainer.predict(kind(vector_rows(7, seed=1)))
        samples = trainer.evaluation_loop(trainer.get_eval_dataloader(kind(vector_rows(7, seed=1))), "Evaluation")
        found.append((output.label_ids.tolist(), samples.num_samples))
    return found


class NumberStream(IterableDataset[int]):
    """Numbers from a place that a generator draws; told its epochs, so that nobody seeds the generator for it."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(50 + RANK)

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        start = int(torch.randint(1000, (), generator=self.generator))
        return iter(range(start, start + 8))


def numbers_of_a_stream(folder: Path) -> list[list[int]]:
    """What this process reads in two epochs of a stream whose generator stands elsewhere in each process."""
    args = quiet_arguments(folder, accelerator_config={"dispatch_batches": False})
    loader = build_loader(args, NumberStream(), sampler=None, collate=list, batch_size=2, is_training=False)
    return [[int(number) for batch in loader for number in batch] for _ in range(2)]


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.rows)


CHECKS: dict[str, Check] = {
    **{f"resumed {name}": resumed(name) for name in RESUMED},
    **{
        check.__name__: check
        for check in (
            a_shorter_dataset,
            uneven_batches,
            streams_that_end_apart,
            rows_read_of_a_stream,
            a_stream_that_fails,
            batches_of_unequal_width,
            streams_predicted_by_each,
            numbers_of_a_stream,
        )
    },
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found = {}
    for number, (name, check) in enumerate(CHECKS.items()):
        # One that fails does not take the others with it.
        with process_group(folder / f"meeting-{number}", RANK, SIZE, LONGEST_WAIT):
            found[name] = check(folder / f"check-{number}")
    (folder / f"{RANK}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_process()
