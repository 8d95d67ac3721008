"""How long does the step loop stand still for a checkpoint?

    python benchmarks/checkpointing.py                        a BERT of 50 million parameters, three sides
    python benchmarks/checkpointing.py --job mlp --rounds 5   a plain module, more rounds
    python benchmarks/checkpointing.py --folder /mnt/disk     where checkpoints are written

Each side trains the same model with AdamW and saves every few steps: model, optimizer, schedule and random states,
about 600 MB, with save_total_limit, so that each save deletes an older checkpoint. The stall is the time from the end
of a step that saves to the beginning of the next one, less what stands there at steps that do not save. littrainer's
includes checksums, fsync and the rename; transformers writes in place and leaves the files to the page cache.

All sides take turns in one process, each round beginning with another side, and the disk is flushed between turns. The
table gives the median over all saves, the fastest and the slowest, and the ratio to transformers. "First" is the first
save of each training, in which a background save also allocates the memory for its copy. "In all" is what one save adds
to the whole training: the wait for the last one, and steps that are slower during a write, are in it. Compare numbers
of one run only. Needs transformers beside littrainer.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate
from transformers.utils.logging import disable_progress_bar

BATCH_SIZE = 2
TOKENS = 16
VOCABULARY = 24_000
MLP_WIDTH = 2048
MLP_LAYERS = 12
SAVE_TOTAL_LIMIT = 2
BASELINE = "transformers"
# Bounds on the ratio of stalls to transformers'.
BOUNDS = {"littrainer": 1.1, "littrainer, async_save": 0.25}

Samples = list[dict[str, torch.Tensor]]


# ---------------------------------------------------------------- jobs


class WideMLP(nn.Module):
    """Square layers and nothing else: the plain nn.Module among the jobs."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(MLP_LAYERS):
            layers += [nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(MLP_WIDTH, 2))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def mlp_samples(count: int) -> Samples:
    return [{"inputs": torch.randn(MLP_WIDTH), "labels": torch.tensor(index % 2)} for index in range(count)]


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        num_hidden_layers=12,
        num_attention_heads=8,
        intermediate_size=2048,
        max_position_embeddings=128,
    )
    return BertForSequenceClassification(config)


def token_samples(count: int) -> Samples:
    return [
        {
            "input_ids": torch.randint(0, VOCABULARY, (TOKENS,)),
            "attention_mask": torch.ones(TOKENS, dtype=torch.long),
            "labels": torch.tensor(index % 2),
        }
        for index in range(count)
    ]


JOBS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Samples]]] = {
    "bert": (bert, token_samples),
    "mlp": (WideMLP, mlp_samples),
}

# Name of a side -> the library that gives the Trainer, and further training arguments.
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers": ("transformers", {}),
    "littrainer": ("littrainer", {}),
    "littrainer, async_save": ("littrainer", {"async_save": True}),
}


# ---------------------------------------------------------------- one training


@dataclass
class StepTimes:
    """When steps began and ended, in seconds."""

    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    finished: float = 0.0

    def gaps(self) -> list[float]:
        """From the end of each step to the beginning of the next; after the last one to the end of training."""
        return [later - earlier for earlier, later in zip(self.ended, [*self.begun[1:], self.finished], strict=True)]


@dataclass
class Measured:
    """What the saves of one training took, in seconds.

    Parameters:
        stalls: of each save but that of the last step, in order.
        in_all: what one save added to the whole training, on average.
    """

    stalls: list[float]
    in_all: float


def train_once(side: str, job: str, saves: int, steps_between: int, folder: Path) -> Measured:
    """Train one side in a folder that is deleted afterwards."""
    library, further = SIDES[side]
    names = importlib.import_module(library)
    build_model, build_samples = JOBS[job]
    # The last steps save nothing, so that each save is followed by a step.
    steps = saves * steps_between + steps_between - 1
    torch.manual_seed(0)
    model, samples = build_model(), build_samples(steps * BATCH_SIZE)
    times = StepTimes()

    class Probe(names.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times.begun.append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times.ended.append(time.perf_counter())

    run_dir = Path(tempfile.mkdtemp(prefix="checkpointing-", dir=folder))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            arguments = names.TrainingArguments(
                output_dir=str(run_dir),
                max_steps=steps,
                per_device_train_batch_size=BATCH_SIZE,
                logging_strategy="no",
                save_strategy="steps",
                save_steps=steps_between,
                save_total_limit=SAVE_TOTAL_LIMIT,
                disable_tqdm=True,
                report_to="none",
                dataloader_pin_memory=False,
                use_cpu=True,
                **further,
            )
            trainer = names.Trainer(
                model=model, args=arguments, train_dataset=samples, data_collator=default_collate, callbacks=[Probe()]
            )
            trainer.train()
            times.finished = time.perf_counter()
        # Both libraries save at the last step too, whatever the interval.
        check_checkpoints(run_dir, last_saved_step=steps)
    finally:
        shutil.rmtree(run_dir)
        del model, samples
        gc.collect()
        os.sync()
    return measured_stalls(times, saves, steps_between)


def check_checkpoints(run_dir: Path, last_saved_step: int) -> None:
    """Raise where a side did not do the work that is timed."""
    found = {path.name for path in run_dir.glob("checkpoint-*")}
    if f"checkpoint-{last_saved_step}" not in found or len(found) != SAVE_TOTAL_LIMIT:
        raise RuntimeError(f"expected checkpoint-{last_saved_step} and the one before it, found {found}")


def measured_stalls(times: StepTimes, saves: int, steps_between: int) -> Measured:
    gaps = times.gaps()
    saving = [number * steps_between - 1 for number in range(1, saves + 1)]
    # What the last gap holds is the end of training, a wait for a background save among it.
    quiet_gap = statistics.median(gap for index, gap in enumerate(gaps[:-1]) if index not in saving)
    # The first steps set up the optimizer; until the first save nothing is written beside a step.
    before_saves = [end - begin for begin, end in zip(times.begun, times.ended, strict=True)][1 : saving[0] + 1]
    quiet_step = statistics.median(before_saves) + quiet_gap
    after_first_step = times.finished - times.ended[0]
    # The end of training saves once more.
    in_all = (after_first_step - quiet_step * (len(gaps) - 1)) / (saves + 1)
    return Measured([gaps[index] - quiet_gap for index in saving], in_all)


# ---------------------------------------------------------------- table


def measure(job: str, rounds: int, saves: int, steps_between: int, folder: Path) -> dict[str, list[Measured]]:
    """One entry for each side and round, after a short training of each side for its imports and caches."""
    sides = list(SIDES)
    for side in sides:
        train_once(side, job, 2, 2, folder)
    found: dict[str, list[Measured]] = {side: [] for side in sides}
    for turn in range(rounds):
        first = turn % len(sides)
        for side in sides[first:] + sides[:first]:
            found[side].append(train_once(side, job, saves, steps_between, folder))
    return found


def print_table(found: dict[str, list[Measured]]) -> None:
    baseline = statistics.median(stall for run in found[BASELINE] for stall in run.stalls)
    print("| side | stall per save, ms | range | first, ms | in all, ms | ratio | bound |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for side, runs in found.items():
        stalls = [stall * 1e3 for run in runs for stall in run.stalls]
        first = statistics.median(run.stalls[0] for run in runs) * 1e3
        in_all = statistics.median(run.in_all for run in runs) * 1e3
        middle = statistics.median(stalls)
        bound = f"{BOUNDS[side]:.2f}" if side in BOUNDS else ""
        print(
            f"| {side} | {middle:.0f} | {min(stalls):.0f} to {max(stalls):.0f} | {first:.0f} | {in_all:.0f} "
            f"| {middle / 1e3 / baseline:.2f} | {bound} |"
        )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="The head of the file says how to read the table."
    )
    parser.add_argument("--job", choices=list(JOBS), default="bert", help="what is trained (default: bert)")
    parser.add_argument("--rounds", type=int, default=3, help="times each side trains (default: 3)")
    parser.add_argument("--saves", type=int, default=4, help="saves of each training (default: 4)")
    parser.add_argument("--steps-between", type=int, default=20, help="optimizer steps from save to save (default: 20)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints are written"
    )
    options = parser.parse_args()
    if options.rounds < 1 or options.saves < 2 or options.steps_between < 3:
        parser.error("--rounds must be at least 1, --saves 2 and --steps-between 3")
    if not options.folder.is_dir():
        parser.error(f"--folder {options.folder} is no folder")
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    disable_progress_bar()
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "safetensors", "transformers", "littrainer"))
    print(f"Python {platform.python_version()}, {libraries}; {platform.machine()}, torch threads: {options.threads}")
    build_model, _ = JOBS[options.job]
    parameters = sum(parameter.numel() for parameter in build_model().parameters())
    print(
        f"\n{options.job}, {parameters / 1e6:.1f} million parameters: {options.rounds} rounds of {options.saves} "
        f"saves, {options.steps_between} steps apart, in {options.folder}\n"
    )
    print_table(measure(options.job, options.rounds, options.saves, options.steps_between, options.folder))


if __name__ == "__main__":
    main()
