"""How much memory does an evaluation of a language model take?

    python benchmarks/evaluation_memory.py                 96 samples of 256 tokens, 32,000 tokens in the vocabulary
    python benchmarks/evaluation_memory.py --samples 12    the same with smaller arrays
    python benchmarks/evaluation_memory.py --rounds 3

A tiny Llama with a large vocabulary is evaluated with a metric function, which is given the logits of all samples in
one array, under transformers and under littrainer, and with a torchmetrics metric, which sees them batch by batch. Each
evaluation runs in a process of its own. Its peak is the largest resident set of the process minus the resident set
right before; what a first evaluation of a few tokens loads is paid by then. The sides take turns, and the table gives
the median over the rounds with the smallest and the largest. The size of the arrays is that of logits and labels as
the metric function gets them; the peak holds the forward pass of a batch and its loss besides.

At full size the evaluation under transformers takes about 7 GiB of memory. transformers and accelerate have to be there
beside littrainer.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCABULARY = 32_000
MIB = 2**20

# Side -> (library, whether metrics are streamed).
SIDES: dict[str, tuple[str, bool]] = {
    "transformers, metric function": ("transformers", False),
    "littrainer, metric function": ("littrainer", False),
    "littrainer, streaming metric": ("littrainer", True),
}
THEIRS, GATHERING, STREAMING = SIDES

# The largest that are accepted: the share of the gathering evaluation that a streaming one takes, its growth when the
# samples double, and the multiple of the arrays' own size that gathering takes.
LARGEST_SHARE = 0.2
LARGEST_GROWTH = 1.1
LARGEST_MULTIPLE = 1.1


@dataclass(frozen=True)
class Size:
    """How much is evaluated: samples, tokens of each, and samples of a batch."""

    samples: int
    tokens: int
    batch: int

    @property
    def array_bytes(self) -> int:
        """Logits in float32 and labels in int64."""
        return self.samples * self.tokens * (VOCABULARY * 4 + 8)


# ---------------------------------------------------------------- one evaluation, in a process of its own


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=1024,
    )
    return LlamaForCausalLM(config)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that are made when they are read, so that the data takes no memory."""

    def __init__(self, samples: int, tokens: int) -> None:
        self.samples, self.tokens = samples, tokens

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + self.tokens) * 7 % VOCABULARY
        return {"input_ids": ids, "labels": ids}


def next_token_accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    right = [np.mean(row[:-1].argmax(axis=-1) == label[1:]) for row, label in zip(logits, labels, strict=True)]
    return {"accuracy": float(np.mean(right))}


def streaming_metric() -> Any:
    from torchmetrics.classification import MulticlassAccuracy

    return {"accuracy": MulticlassAccuracy(VOCABULARY, average="micro", validate_args=False)}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def largest_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(side: str, size: Size) -> dict[str, float]:
    """Peak of an evaluation over the memory before it, in bytes, and what it found."""
    library, streams = SIDES[side]
    names = importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = names.TrainingArguments(
            output_dir=folder,
            per_device_eval_batch_size=size.batch,
            disable_tqdm=True,
            report_to="none",
            use_cpu=True,
        )
        trainer = names.Trainer(
            model=model(), args=arguments, compute_metrics=streaming_metric() if streams else next_token_accuracy
        )
        trainer.evaluate(Tokens(2, 8))
        gc.collect()
        before = resident_bytes()
        found = trainer.evaluate(Tokens(size.samples, size.tokens))
    return {"peak": largest_resident_bytes() - before, "accuracy": found["eval_accuracy"]}


# ---------------------------------------------------------------- all of them, in turns


def measure_in_process(side: str, size: Size) -> dict[str, float]:
    command = [sys.executable, __file__, "--side", side]
    command += ["--samples", str(size.samples), "--tokens", str(size.tokens), "--batch", str(size.batch)]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(f"{side} failed:\n{finished.stderr}")
    return json.loads(finished.stdout.splitlines()[-1])


def measure_all(size: Size, rounds: int) -> dict[tuple[str, Size], list[float]]:
    """Peaks in bytes, one entry for each round."""
    runs = [(side, size) for side in SIDES] + [(STREAMING, Size(2 * size.samples, size.tokens, size.batch))]
    peaks: dict[tuple[str, Size], list[float]] = {run: [] for run in runs}
    accuracies: dict[Size, set[float]] = {}
    for turn in range(rounds):
        first = turn % len(runs)
        for side, own_size in runs[first:] + runs[:first]:
            measured = measure_in_process(side, own_size)
            peaks[side, own_size].append(measured["peak"])
            accuracies.setdefault(own_size, set()).add(round(measured["accuracy"], 6))
    for own_size, found in accuracies.items():
        if len(found) > 1:
            raise SystemExit(f"The sides do not agree on the accuracy over {own_size.samples} samples: {found}")
    return peaks


def print_peaks(peaks: dict[tuple[str, Size], list[float]]) -> None:
    print("| side | samples | arrays, MiB | peak, MiB | range | peak / arrays |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for (side, size), seen in peaks.items():
        middle = statistics.median(seen)
        print(
            f"| {side} | {size.samples} | {size.array_bytes / MIB:.0f} | {middle / MIB:.0f} "
            f"| {min(seen) / MIB:.0f} to {max(seen) / MIB:.0f} | {middle / size.array_bytes:.2f} |"
        )


def print_gates(peaks: dict[tuple[str, Size], list[float]], size: Size) -> bool:
    middle = {run: statistics.median(seen) for run, seen in peaks.items()}
    gathering, streaming = middle[GATHERING, size], middle[STREAMING, size]
    (doubled,) = (value for (side, own), value in middle.items() if side == STREAMING and own != size)
    gates = (
        ("streaming / gathering", streaming / gathering, LARGEST_SHARE),
        ("streaming / gathering of transformers", streaming / middle[THEIRS, size], LARGEST_SHARE),
        ("streaming, twice the samples / once", doubled / streaming, LARGEST_GROWTH),
        ("gathering / arrays", gathering / size.array_bytes, LARGEST_MULTIPLE),
    )
    print()
    for name, value, largest in gates:
        print(f"{'met   ' if value <= largest else 'MISSED'} {name}: {value:.3f}, at most {largest}")
    return all(value <= largest for _, value, largest in gates)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="The head of the file says how to read the table."
    )
    parser.add_argument("--samples", type=int, default=96, help="samples of the evaluation set (default: 96)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each sample (default: 256)")
    parser.add_argument("--batch", type=int, default=2, help="samples of a batch (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs (default: 3)")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.samples, options.tokens, options.batch, options.rounds) < 1:
        parser.error("--samples, --tokens, --batch and --rounds must be at least 1")
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    size = Size(options.samples, options.tokens, options.batch)
    if options.side:
        print(json.dumps(measure(options.side, size)))
        return
    if not sys.platform.startswith("linux"):
        raise SystemExit("This benchmark reads resident memory from /proc, which Linux has.")
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchmetrics", "transformers", "littrainer"))
    print(f"Python {platform.python_version()}, {libraries}; {platform.machine()}, one thread")
    print(
        f"\nEvaluation of a language model: {size.tokens} tokens a sample, vocabulary {VOCABULARY}, "
        f"batch {size.batch}; rounds: {options.rounds}\n"
    )
    peaks = measure_all(size, options.rounds)
    print_peaks(peaks)
    sys.exit(0 if print_gates(peaks, size) else 1)


if __name__ == "__main__":
    main()
