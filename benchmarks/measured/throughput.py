"""How many samples per second does each side train and evaluate, on small transformers?

Training is timed as in the step benchmark, from the end of the warm-up on. Evaluation is a whole call; classifiers
compute accuracy from all logits, the language model its loss. Samples of 2 to 63 tokens are trained in random batches
of 8, and by what saves their padding; the last of two epochs is timed.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from typing import Any

import torch

from ..benchmark import Benchmark, Case, Measured
from ..evaluations import BATCH_SIZE, prepared_evaluation
from ..figures import Figures, markdown
from ..jobs import JOBS
from ..sides import EVERY_SIDE, OURS, THEIRS, Side
from ..stopwatch import timed
from ..trainings import Plan, clocked, prepared_training, silenced

LONGEST = 64
# Job -> what saves padding, for as many tokens in a batch as the longest samples make.
BY_TOKENS: dict[str, dict[str, Any]] = {
    "tiny-bert": {"max_tokens_per_batch": BATCH_SIZE * LONGEST},
    "tiny-gpt2": {"pack_to_length": LONGEST},
}


def side_by_tokens(job: str) -> str:
    return f"littrainer, {next(iter(BY_TOKENS[job]))}"


def times_as_many(job: str, figures: Figures) -> str:
    """Samples of a second by tokens, as a multiple of those in random batches; nothing if they were not measured."""
    case = f"{job}-lengths"
    return f"{figures.ratio(case, side_by_tokens(job), OURS.name, 'cpu_samples'):.2f}" if case in figures else ""


def of_many_lengths(samples: list[dict[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """Cut samples of 64 tokens to lengths that are drawn, the same ones on every side."""
    lengths = torch.randint(2, LONGEST, (len(samples),), generator=torch.Generator().manual_seed(0)).tolist()
    return [
        {name: value[:length] if value.dim() else value for name, value in sample.items()}
        for sample, length in zip(samples, lengths, strict=True)
    ]


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch as wide as its longest sample."""
    batch: dict[str, torch.Tensor] = {}
    for name, first in samples[0].items():
        values = [sample[name] for sample in samples]
        fill = -100 if name == "labels" else 0
        joined = torch.stack(values) if not first.dim() else None
        batch[name] = joined if joined is not None else torch.nn.utils.rnn.pad_sequence(values, True, fill)
    if "attention_mask" not in batch:
        batch["attention_mask"] = (batch["labels"] != -100).long()
    return batch


def measure_lengths(side: Side, job: str, batches: int, folder: str) -> Measured:
    """Samples of a second, in the second of two epochs."""
    samples = of_many_lengths(JOBS[job].samples(batches * BATCH_SIZE))
    arguments = {"max_steps": -1, "num_train_epochs": 2, **(BY_TOKENS[job] if side.variant else {})}
    plan = Plan(
        JOBS[job], folder, 0, BATCH_SIZE, arguments=arguments, samples=samples, trainer_kwargs={"data_collator": padded}
    )
    times: list[tuple[float, float]] = []

    def note() -> None:
        times.append((time.perf_counter(), time.process_time()))

    train = prepared_training(side, plan, {"epoch_begin": note, "epoch_end": note})
    with silenced():
        train()
    began, ended = times[-2:]
    took = dict(zip(("wall", "cpu"), (end - begin for begin, end in zip(began, ended, strict=True)), strict=True))
    return {f"{clock}_samples": len(samples) / seconds for clock, seconds in took.items()}


def measure(side: Side, job: str, mode: str, batches: int, warmup: int = 0) -> Measured:
    """Samples of a second of processor time and by the clock on the wall."""
    with tempfile.TemporaryDirectory() as folder:
        if mode == "lengths":
            return measure_lengths(side, job, batches, folder)
        if mode == "train":
            per_step = clocked(side, Plan(JOBS[job], folder, batches, BATCH_SIZE), warmup).per_step()
            seconds = {clock: per_step[f"{clock}_us"] / 1e6 for clock in ("wall", "cpu")}
        else:
            evaluate = prepared_evaluation(side, JOBS[job], batches, folder)
            with silenced():
                evaluate()
                took = timed(evaluate)
            seconds = {clock: took[f"{clock}_s"] / batches for clock in ("wall", "cpu")}
    return {f"{clock}_samples": BATCH_SIZE / value for clock, value in seconds.items()}


def cases(batches: int, warmup: int) -> tuple[Case, ...]:
    by_tokens = tuple(
        Case(
            f"{job}-lengths",
            f"{JOBS[job].title.replace('64 tokens', '2 to 63 tokens')}: training",
            (OURS, Side(side_by_tokens(job), "littrainer", variant="tokens"), THEIRS),
            {"job": job, "mode": "lengths", "batches": 2 * batches},
        )
        for job in BY_TOKENS
    )
    return (
        *(
            Case(
                f"{job}-{mode}",
                f"{JOBS[job].title}: {word}",
                EVERY_SIDE,
                {"job": job, "mode": mode, "batches": batches, "warmup": warmup},
            )
            for job in ("tiny-bert", "tiny-gpt2")
            for mode, word in (("train", "training"), ("eval", "evaluation"))
        ),
        *by_tokens,
    )


def table(figures: Figures) -> str:
    rows = []
    for case in figures.cases:
        for side in figures.sides(case):
            rows.append(
                (
                    figures.title(case),
                    figures.shown(side),
                    f"{figures.median(case, side, 'cpu_samples'):.0f}",
                    figures.spread(case, side, "cpu_samples"),
                    f"{figures.median(case, side, 'wall_samples'):.0f}",
                    f"{figures.ratio(case, side, THEIRS.name, 'cpu_samples'):.2f}",
                )
            )
    columns = ("model", "side", "samples per CPU second", "range", "per wall second", "as a multiple of transformers'")
    return markdown(columns, rows, names=2)


BENCHMARK = Benchmark(
    name="throughput",
    question="How many samples per second are trained and evaluated?",
    measure=measure,
    full=cases(batches=20, warmup=4),
    short=cases(batches=3, warmup=1),
    rounds=5,
    tables={"throughput": table, **{f"{job}-lengths": partial(times_as_many, job) for job in BY_TOKENS}},
)
