"""Resumes from damaged checkpoints: every file, damaged in every way.

    python -m tests.faults.damage                          littrainer's checkpoints
    python -m tests.faults.damage --trainer transformers   the same cases with transformers' Trainer
    python -m tests.faults.damage --written-by transformers  transformers' checkpoints, without manifest
    python -m tests.faults.damage --bits 100               100 random flipped bits of each file instead, except
                                                           trainer_state.json, which may be edited

A training of six steps saves at steps 2 and 4 and is stopped after step 4. With a damaged checkpoint-4 it is resumed by
`resume_from_checkpoint=True` and by name, and the final weights are compared bit for bit. Outcomes:

    exact     the same weights, from checkpoint-4
    earlier   the same weights, from checkpoint-2
    error     an exception that names the file ("unclear" if it does not)
    different other weights without an exception
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import io
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, token_rows
from tests.scenarios.models import tiny_bert_classifier

STEPS, STOPPED_AT, SAVE_STEPS = 6, 4, 2
DAMAGED = f"checkpoint-{STOPPED_AT}"
SIDES = ("littrainer", "transformers")


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "halved": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "bit flipped": lambda path: flip_bit(path, path.stat().st_size * 4),
}


def random_bits(count: int, seed: int = 0) -> dict[str, Callable[[Path], object]]:
    """Return damages that flip a bit at reproducible random positions."""
    return {
        f"bit {number}": lambda path, number=number: flip_bit(  # type: ignore[misc]
            path, random.Random(f"{seed} {number} {path.name}").randrange(path.stat().st_size * 8)
        )
        for number in range(count)
    }


def build_trainer(library: str, folder: Path, **changes: Any) -> Any:
    """Return a library's Trainer of a tiny model with dropout and fixed initial weights."""
    names = importlib.import_module(library)
    torch.manual_seed(0)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": SAVE_STEPS,
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return names.Trainer(
        model=tiny_bert_classifier(),
        args=names.TrainingArguments(output_dir=str(folder), **{**arguments, **changes}),
        train_dataset=Rows(token_rows(8)),
        data_collator=pad_tokens,
    )


def stop_at(library: str, step: int) -> Any:
    """Return a callback that ends training after a step."""

    class Stop(importlib.import_module(library).TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= step

    return Stop()


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def is_equal(weights: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return weights.keys() == other.keys() and all(torch.equal(weights[name], other[name]) for name in weights)


class Matrix:
    """Resumes of a library from checkpoints of a library.

    Parameters:
        root: the working folder.
        trainer: the library that resumes.
        written_by: the library that wrote the checkpoints.
    """

    def __init__(self, root: Path, trainer: str, written_by: str) -> None:
        self.root, self.library = root, trainer
        with quiet():
            uninterrupted = build_trainer(written_by, root / "uninterrupted")
            uninterrupted.train()
            self.expected = weights_of(uninterrupted)
            stopped = build_trainer(written_by, root / "stopped")
            stopped.add_callback(stop_at(written_by, STOPPED_AT))
            stopped.train()
        folder = root / "stopped" / DAMAGED
        self.files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())

    def outcome(self, file: str, damage: Callable[[Path], object], by_name: bool) -> str:
        """Damage one file of the newest checkpoint and resume."""
        run_dir = self.root / "run"
        shutil.copytree(self.root / "stopped", run_dir)
        try:
            damage(run_dir / DAMAGED / file)
            trainer = build_trainer(self.library, run_dir)
            first_steps: list[int] = []
            trainer.add_callback(self._record_first_step(first_steps))
            try:
                with quiet():
                    trainer.train(resume_from_checkpoint=str(run_dir / DAMAGED) if by_name else True)
            except Exception as error:
                return "error" if Path(file).name in str(error) else f"unclear error ({type(error).__name__})"
            if not is_equal(weights_of(trainer), self.expected):
                return "different"
            return "exact" if first_steps[0] == STOPPED_AT else "earlier"
        finally:
            shutil.rmtree(run_dir)

    def _record_first_step(self, steps: list[int]) -> Any:
        class Record(importlib.import_module(self.library).TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                steps.append(state.global_step)

        return Record()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress output and warnings."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def print_outcomes(
    matrix: Matrix, damages: dict[str, Callable[[Path], object]], by_name: bool, without: str = ""
) -> collections.Counter[str]:
    """Run all cases, except those of file `without`, and print a line for each file."""
    total: collections.Counter[str] = collections.Counter()
    print(f"\nresume_from_checkpoint={DAMAGED!r}" if by_name else "\nresume_from_checkpoint=True")
    for file in [name for name in matrix.files if name != without]:
        outcomes = {name: matrix.outcome(file, damage, by_name) for name, damage in damages.items()}
        counts = collections.Counter(outcomes.values())
        total.update(counts)
        print(f"{file}: {outcomes if damages is DAMAGES else dict(counts)}", flush=True)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=SIDES, default=SIDES[0], help="which library resumes")
    parser.add_argument("--written-by", choices=SIDES, help="which library wrote the checkpoints (default: the same)")
    parser.add_argument("--bits", type=int, default=0, help="flip this many bits of each file instead, one at a time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        matrix = Matrix(Path(root), options.trainer, options.written_by or options.trainer)
        wrong: set[str] = set()
        print(f"Resumed by {options.trainer}; written by {options.written_by or options.trainer}")
        for by_name in (False, True):
            if options.bits:
                # A trainer_state.json with a flipped bit that parses is an edit, as in transformers.
                counts = print_outcomes(matrix, random_bits(options.bits), by_name, "trainer_state.json")
            else:
                counts = print_outcomes(matrix, DAMAGES, by_name)
            print(
                f"{sum(counts.values())} cases: {', '.join(f'{n} {outcome}' for outcome, n in sorted(counts.items()))}"
            )
            wrong |= counts.keys() - {"exact", "earlier", "error"}
    if wrong and options.trainer == SIDES[0] and options.written_by in (None, SIDES[0]):
        sys.exit(f"not as it should be: {', '.join(sorted(wrong))}")


if __name__ == "__main__":
    main()
