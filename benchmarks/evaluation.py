"""How fast is an evaluation beside that of transformers, and what does a call cost before its first batch?

    python benchmarks/evaluation.py                     both tables, both jobs
    python benchmarks/evaluation.py --job mlp --rounds 9 --clock cpu

Both sides get the same words: a Trainer with a metric function, which evaluates the same samples in batches of 8. They
take turns in one process on one thread, each round starting with the other side, so that a change of clock speed or
load falls on both. The time of a call is that of `evaluate()` from entry to return; model, data and Trainer stand
before, and the first calls of each side, which pay for caches, do not count. "Outside fit" is a call on its own, "in
fit" one that `eval_steps` asks for during training.

The first table gives samples per second over many batches. The second gives the time of a call over a single batch,
nearly all of which is what a call costs however little it evaluates, and from how many batches on a call takes no
longer than under transformers. Tables give medians over the rounds, and the median of the ratios within a round; below
the first one stands whether its ratios are where they have to be. Compare numbers of one run only; on a busy machine,
--clock cpu leaves out the time in which other processes ran. Needs transformers and accelerate beside littrainer.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import math
import platform
import statistics
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from step_overhead import BATCH_SIZE, CLOCKS, Samples, TinyMLP, bert, mlp_samples, token_samples
from torch import nn
from torch.utils.data import default_collate

SIDES = ("littrainer", "transformers")
# Calls of a side in one round; the median of their times is the round's.
CALLS_PER_ROUND = 3
SHORT_CALLS_PER_ROUND = 12
STEPS_BETWEEN_CALLS = 2


@dataclass(frozen=True)
class Job:
    """A model and its data.

    Parameters:
        title: What the table names it.
        build_model: Makes the model, the same weights after the same seed.
        build_samples: Makes that many samples.
        batches: Batches in one evaluation.
        least_ratio: Bound on the samples per second, over those of transformers.
    """

    title: str
    build_model: Callable[[], nn.Module]
    build_samples: Callable[[int], Samples]
    batches: int
    least_ratio: float


JOBS = {
    "mlp": Job("MLP 16-32-2", TinyMLP, mlp_samples, batches=400, least_ratio=1.3),
    "bert": Job(
        "BERT, 2 layers of width 32, 16 tokens",
        lambda: bert(32, 2),
        lambda n: token_samples(n, 16),
        batches=120,
        least_ratio=1.0,
    ),
}


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class Evaluating:
    """A Trainer of one side, and the seconds that each of its `evaluate()` calls took.

    Parameters:
        library: transformers or littrainer; both take the same words.
        job: The model and the data.
        batches: Batches in one evaluation.
        now: Gives the time in seconds.
    """

    def __init__(self, library: str, job: Job, batches: int, now: Callable[[], float], folder: str):
        names = importlib.import_module(library)
        Trainer: Any = names.Trainer
        self.seconds = seconds = []  # type: list[float]

        class TimedTrainer(Trainer):
            def evaluate(self, *args: Any, **kwargs: Any) -> Any:
                start = now()
                metrics = super().evaluate(*args, **kwargs)
                seconds.append(now() - start)
                return metrics

        torch.manual_seed(0)
        samples = job.build_samples(batches * BATCH_SIZE)
        arguments = names.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH_SIZE,
            per_device_eval_batch_size=BATCH_SIZE,
            max_steps=STEPS_BETWEEN_CALLS * SHORT_CALLS_PER_ROUND,
            eval_strategy="steps",
            eval_steps=STEPS_BETWEEN_CALLS,
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            report_to="none",
            dataloader_pin_memory=False,
            use_cpu=True,
        )
        self.trainer = TimedTrainer(
            model=job.build_model(),
            args=arguments,
            train_dataset=samples,
            eval_dataset=samples,
            data_collator=default_collate,
            compute_metrics=accuracy,
        )

    def outside_fit(self, calls: int) -> float:
        """Median seconds of a call on its own."""
        self.seconds.clear()
        gc.collect()
        with contextlib.redirect_stdout(io.StringIO()):
            for _ in range(calls):
                self.trainer.evaluate()
        return statistics.median(self.seconds)

    def inside_fit(self) -> float:
        """Median seconds of a call that training asks for."""
        self.seconds.clear()
        gc.collect()
        with contextlib.redirect_stdout(io.StringIO()):
            self.trainer.train()
        return statistics.median(self.seconds)


def taking_turns(rounds: int, measure: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """What each side measures, one entry for each round; a first round is left out."""
    sides = list(measure)
    measured: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        for side in sides if turn % 2 else reversed(sides):
            value = measure[side]()
            if turn:
                measured[side].append(value)
    return measured


def ratio_of_medians(above: list[float], below: list[float]) -> float:
    """The median of the ratios within each round."""
    return statistics.median(mine / theirs for mine, theirs in zip(above, below, strict=True))


def print_throughput(job_names: list[str], rounds: int, clock: str) -> dict[str, dict[str, float]]:
    """Samples per second over many batches, outside fit; returns the seconds of a batch by job and side."""
    print(f"\nSamples per second of evaluate(), batch {BATCH_SIZE}: median of {rounds} rounds, {clock} time\n")
    print("| model | batches | littrainer | transformers | ratio |")
    print("| --- | ---: | ---: | ---: | ---: |")
    of_a_batch: dict[str, dict[str, float]] = {}
    verdicts = []
    for name in job_names:
        job = JOBS[name]
        with tempfile.TemporaryDirectory() as folder:
            sides = {side: Evaluating(side, job, job.batches, CLOCKS[clock], folder) for side in SIDES}
            seconds = taking_turns(
                rounds, {side: partial(each.outside_fit, CALLS_PER_ROUND) for side, each in sides.items()}
            )
        of_a_batch[name] = {side: statistics.median(seconds[side]) / job.batches for side in SIDES}
        ours, theirs = (BATCH_SIZE / of_a_batch[name][side] for side in SIDES)
        ratio = ratio_of_medians(seconds["transformers"], seconds["littrainer"])
        print(f"| {job.title} | {job.batches} | {ours:.0f} | {theirs:.0f} | {ratio:.2f} |")
        verdict = "met   " if ratio >= job.least_ratio else "MISSED"
        verdicts.append(f"{verdict} {job.title}: {ratio:.2f}, at least {job.least_ratio}")
    print("", *verdicts, sep="\n")
    return of_a_batch


def print_cost_per_call(of_a_batch: dict[str, dict[str, float]], rounds: int, clock: str) -> None:
    """Milliseconds of a call over a single batch, and how many batches make up for what it costs more."""
    print(f"\nMilliseconds of evaluate() over one batch of {BATCH_SIZE}: median of {rounds} rounds, {clock} time\n")
    print("| model | call | littrainer | transformers | no slower from |")
    print("| --- | --- | ---: | ---: | ---: |")
    for name, batch_seconds in of_a_batch.items():
        job = JOBS[name]
        with tempfile.TemporaryDirectory() as folder:
            sides = {side: Evaluating(side, job, 1, CLOCKS[clock], folder) for side in SIDES}
            calls: dict[str, Callable[[Evaluating], float]] = {
                "outside fit": lambda each: each.outside_fit(SHORT_CALLS_PER_ROUND),
                "in fit": Evaluating.inside_fit,
            }
            for place, call in calls.items():
                seconds = taking_turns(rounds, {side: partial(call, each) for side, each in sides.items()})
                medians = {side: statistics.median(seconds[side]) for side in SIDES}
                shown = " | ".join(f"{medians[side] * 1e3:.2f}" for side in SIDES)
                print(f"| {job.title} | {place} | {shown} | {batches_to_make_up(medians, batch_seconds)} |")


def batches_to_make_up(call_seconds: dict[str, float], batch_seconds: dict[str, float]) -> str:
    """From how many batches on a call of ours takes no longer."""
    ours, theirs = SIDES
    more_for_a_call = call_seconds[ours] - call_seconds[theirs]
    less_for_a_batch = batch_seconds[theirs] - batch_seconds[ours]
    if more_for_a_call <= 0:
        return "1 batch"
    return "never" if less_for_a_batch <= 0 else f"{1 + math.ceil(more_for_a_call / less_for_a_batch)} batches"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="The head of the file says how to read the tables."
    )
    parser.add_argument("--job", choices=list(JOBS), help="one job only (default: both)")
    parser.add_argument("--rounds", type=int, default=7, help="times each side takes its turn (default: 7)")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="what the times count")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "transformers", "littrainer"))
    print(f"Python {platform.python_version()}, {libraries}; {platform.machine()}, one thread")
    job_names = [options.job] if options.job else list(JOBS)
    of_a_batch = print_throughput(job_names, options.rounds, options.clock)
    print_cost_per_call(of_a_batch, options.rounds, options.clock)


if __name__ == "__main__":
    main()
