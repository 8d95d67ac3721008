"""What does a trainer cost per optimizer step, over a raw PyTorch loop that does the same arithmetic?

    python benchmarks/step_overhead.py                  microseconds per step, tiny models
    python benchmarks/step_overhead.py --job mlp --rounds 9 --clock cpu
    python benchmarks/step_overhead.py --accumulation 4 four micro-batches for each optimizer step
    python benchmarks/step_overhead.py --memory         peak memory of a whole process

Every side draws shuffled batches of 8, runs forward and backward, clips to norm 1, takes an AdamW step and advances a
linear schedule; none logs, saves or shows a bar. All sides take turns in one process on one thread, each round
starting with another side, so that a change of clock speed or load falls on all of them. Time counts from the end of
the last warm-up step to the end of the last step, seen by a callback of the side's own kind: imports, construction and
the end of training stay out. A table gives the median over the rounds, the fastest and the slowest round, the median
of the differences to the raw loop of the same round, and that as a share of transformers'. Compare numbers of one run
only; on a busy machine, --clock cpu leaves out the time in which other processes ran.

With --memory each side trains the same job in a process of its own, checkpoint included, and the table gives the
largest resident set that the process reached. Both need transformers and accelerate beside littrainer.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import logging
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

BATCH_SIZE = 8
LEARNING_RATE = 1e-3
MAX_NORM = 1.0
WARMUP_STEPS = 20

Samples = list[dict[str, torch.Tensor]]


# ---------------------------------------------------------------- jobs


class TinyMLP(nn.Module):
    """Two linear layers, so that nearly all of a step is the loop around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def mlp_samples(count: int) -> Samples:
    return [{"inputs": torch.randn(16), "labels": torch.tensor(index % 2)} for index in range(count)]


def bert(width: int, layers: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=1000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * width,
        max_position_embeddings=128,
    )
    return BertForSequenceClassification(config)


def token_samples(count: int, length: int) -> Samples:
    return [
        {
            "input_ids": torch.randint(0, 1000, (length,)),
            "attention_mask": torch.ones(length, dtype=torch.long),
            "labels": torch.tensor(index % 2),
        }
        for index in range(count)
    ]


@dataclass(frozen=True)
class Job:
    """A model and its data.

    Parameters:
        title: What the table is headed with.
        build_model: Makes the model, the same weights after the same seed.
        build_samples: Makes that many samples.
        steps: Optimizer steps of one run, warm-up included.
        accumulation: Micro-batches of an optimizer step.
    """

    title: str
    build_model: Callable[[], nn.Module]
    build_samples: Callable[[int], Samples]
    steps: int
    accumulation: int = 1


STEP_JOBS = {
    "mlp": Job("MLP 16-32-2", TinyMLP, mlp_samples, steps=420),
    "bert": Job(
        "BERT, 2 layers of width 32, 16 tokens", lambda: bert(32, 2), lambda n: token_samples(n, 16), steps=120
    ),
}
MEMORY_JOBS = {
    "mlp": Job("MLP 16-32-2", TinyMLP, mlp_samples, steps=40),
    "bert": Job(
        "BERT, 4 layers of width 256, 128 tokens", lambda: bert(256, 4), lambda n: token_samples(n, 128), steps=20
    ),
}


# ---------------------------------------------------------------- sides


@dataclass
class StepClock:
    """Seconds per optimizer step, from the end of the warm-up to the last step that ended.

    Parameters:
        now: Gives the time in seconds.
    """

    now: Callable[[], float] = time.perf_counter
    steps: int = 0
    start: float = 0.0
    end: float = 0.0

    def step_ended(self) -> None:
        self.steps += 1
        self.end = self.now()
        if self.steps == WARMUP_STEPS:
            self.start = self.end

    @property
    def seconds_per_step(self) -> float:
        return (self.end - self.start) / (self.steps - WARMUP_STEPS)


def optimizer_and_schedule(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / steps))
    return optimizer, schedule


def batches(samples: Samples) -> DataLoader[Any]:
    return DataLoader(samples, batch_size=BATCH_SIZE, shuffle=True, collate_fn=default_collate)  # type: ignore[arg-type]


def run_raw(model: nn.Module, samples: Samples, job: Job, clock: StepClock) -> None:
    optimizer, schedule = optimizer_and_schedule(model, job.steps)
    model.train()
    for number, batch in enumerate(batches(samples), start=1):
        loss = model(**batch)["loss"]
        (loss if job.accumulation == 1 else loss / job.accumulation).backward()
        if number % job.accumulation:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        clock.step_ended()


def run_lightning(model: nn.Module, samples: Samples, job: Job, clock: StepClock) -> None:
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], batch_index: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer, schedule = optimizer_and_schedule(self.model, job.steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Probe(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % job.accumulation == 0:
                clock.step_ended()

    model.train()
    trainer = pl.Trainer(
        max_steps=job.steps,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=MAX_NORM,
        accumulate_grad_batches=job.accumulation,
        callbacks=[Probe()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), batches(samples))


def run_trainer(
    library: str, model: nn.Module, samples: Samples, job: Job, clock: StepClock, save_strategy: str = "no"
) -> None:
    """Train with the Trainer of transformers or littrainer; both take the same words."""
    names = importlib.import_module(library)

    class Probe(names.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.step_ended()

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = names.TrainingArguments(
            output_dir=folder,
            max_steps=job.steps,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_NORM,
            gradient_accumulation_steps=job.accumulation,
            logging_strategy="no",
            save_strategy=save_strategy,
            save_steps=job.steps,
            disable_tqdm=True,
            report_to="none",
            dataloader_pin_memory=False,
            use_cpu=True,
        )
        trainer = names.Trainer(
            model=model, args=arguments, train_dataset=samples, data_collator=default_collate, callbacks=[Probe()]
        )
        trainer.train()


SIDES: dict[str, Callable[[nn.Module, Samples, Job, StepClock], None]] = {
    "raw PyTorch": run_raw,
    "littrainer": lambda *run: run_trainer("littrainer", *run),
    "transformers": lambda *run: run_trainer("transformers", *run),
    "Lightning": run_lightning,
}
BASELINE = "raw PyTorch"


# ---------------------------------------------------------------- time


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def microseconds_per_step(side: str, job: Job, clock_name: str) -> float:
    torch.manual_seed(0)
    model, samples = job.build_model(), job.build_samples(job.steps * BATCH_SIZE * job.accumulation)
    clock = StepClock(CLOCKS[clock_name])
    gc.collect()
    SIDES[side](model, samples, job, clock)
    if clock.steps != job.steps:
        raise RuntimeError(f"{side} took {clock.steps} optimizer steps where {job.steps} were asked for")
    return clock.seconds_per_step * 1e6


def measure_steps(job: Job, rounds: int, clock_name: str) -> dict[str, list[float]]:
    """Microseconds per step for each side, one entry for each round."""
    sides = list(SIDES)
    for side in sides:
        microseconds_per_step(side, job, clock_name)  # first use of a side pays for its imports and caches
    measured: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds):
        first = turn % len(sides)
        for side in sides[first:] + sides[:first]:
            measured[side].append(microseconds_per_step(side, job, clock_name))
    return measured


def print_steps(job: Job, measured: dict[str, list[float]], clock_name: str) -> None:
    rounds = len(measured[BASELINE])
    steps = job.steps - WARMUP_STEPS
    windows = "" if job.accumulation == 1 else f", {job.accumulation} micro-batches for each step"
    print(f"\n{job.title}, batch {BATCH_SIZE}{windows}: {rounds} rounds of {steps} steps, {clock_name} time\n")
    print("| side | us per step | range | over the raw loop, us | share of transformers' |")
    print("| --- | ---: | ---: | ---: | ---: |")
    over = {
        side: statistics.median(mine - raw for mine, raw in zip(times, measured[BASELINE], strict=True))
        for side, times in measured.items()
    }
    for side, times in measured.items():
        cells = " | " if side == BASELINE else f"{over[side]:.0f} | {over[side] / over['transformers']:.2f}"
        print(f"| {side} | {statistics.median(times):.0f} | {min(times):.0f} to {max(times):.0f} | {cells} |")


# ---------------------------------------------------------------- memory


def peak_resident_mib() -> float:
    """The largest resident set of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def train_and_print_peak(library: str, job: Job) -> None:
    torch.manual_seed(0)
    model, samples = job.build_model(), job.build_samples(job.steps * BATCH_SIZE)
    run_trainer(library, model, samples, job, StepClock(), save_strategy="steps")
    print(peak_resident_mib())


def peak_of_process(library: str, job_name: str) -> float:
    command = [sys.executable, __file__, "--peak-of", library, "--job", job_name]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(f"{library} failed on the {job_name} job:\n{finished.stderr}")
    return float(finished.stdout.split()[-1])


def print_memory(job_names: list[str], rounds: int) -> None:
    print("\nPeak resident memory of a process that imports, trains and saves once, MiB\n")
    print("| job | transformers | littrainer | ratio |")
    print("| --- | ---: | ---: | ---: |")
    for name in job_names:
        peaks: dict[str, list[float]] = {"transformers": [], "littrainer": []}
        for _ in range(rounds):
            for library, seen in peaks.items():
                seen.append(peak_of_process(library, name))
        theirs, ours = (statistics.median(seen) for seen in peaks.values())
        print(f"| {MEMORY_JOBS[name].title} | {theirs:.0f} | {ours:.0f} | {ours / theirs:.3f} |")


# ---------------------------------------------------------------- command line


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="The head of the file says how to read the tables."
    )
    parser.add_argument("--job", choices=["mlp", "bert"], help="one job only (default: both)")
    parser.add_argument("--rounds", type=int, help="times each side runs (default: 7, with --memory 3)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step (default: 1)")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="what the time per step counts")
    parser.add_argument("--memory", action="store_true", help="compare peak memory instead of time per step")
    parser.add_argument("--peak-of", choices=["transformers", "littrainer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.accumulation < 1:
        parser.error("--accumulation must be at least 1")
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if options.peak_of:
        train_and_print_peak(options.peak_of, MEMORY_JOBS[options.job])
        return
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "transformers", "littrainer"))
    print(f"Python {platform.python_version()}, {libraries}; {platform.machine()}, one thread")
    job_names = [options.job] if options.job else list(STEP_JOBS)
    if options.memory:
        print_memory(job_names, options.rounds or 3)
        return
    for name in job_names:
        job = replace(STEP_JOBS[name], accumulation=options.accumulation)
        print_steps(job, measure_steps(job, options.rounds or 7, options.clock), options.clock)


if __name__ == "__main__":
    main()
