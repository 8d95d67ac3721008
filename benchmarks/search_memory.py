"""How much memory does a hyperparameter search keep from trial to trial?

    python benchmarks/search_memory.py              20 trials of a model with 20 million parameters
    python benchmarks/search_memory.py --trials 40

Trials of a wide two-layer classifier with AdamW, an evaluation after each of three steps. Of each three trials in a row
one is complete, one is pruned, and one fails in its backward pass. The resident set of the process is read after each
trial. A search that kept a model, its gradients or its optimizer would grow by that in each; one that keeps nothing has
in no later trial more than in the first three. The search runs in a process of its own, with littrainer and with
transformers.

transformers, accelerate and optuna have to be there beside littrainer.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import platform
import resource
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

LIBRARIES = ("transformers", "littrainer")
WIDTH = 4400
MIB = 2**20
# Trials after which each way to end has been met once.
FIRST = 3
# The largest growth from then on that is accepted, as a share of what one model and its optimizer take.
LARGEST_GROWTH = 0.5


class Wide(nn.Module):
    """A classifier with two layers of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(torch.relu(self.inner(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that are made when they are read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((WIDTH,), float(index % 2)), "labels": torch.tensor(index % 2)}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def bytes_of_a_trial() -> int:
    """Weights, gradients and the two moments of AdamW."""
    return 4 * 4 * sum(parameter.numel() for parameter in Wide().parameters())


def measure(library: str, trials: int) -> list[int]:
    """The resident set after each trial, in bytes."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    names = importlib.import_module(library)

    class Prunes(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return trial.number % 3 == 1 and trial.last_step == 2

    class Fails(names.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if trainer._trial.number % 3 == 2:
                raise RuntimeError("out of memory")

    after: list[int] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = names.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            num_train_epochs=1,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            report_to="none",
            use_cpu=True,
            log_level="critical",
        )
        trainer = names.Trainer(
            model_init=lambda: Wide(), args=arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[Fails()]
        )

        def objective(metrics: dict[str, float]) -> float:
            return metrics["eval_loss"]

        class Reads(optuna.samplers.RandomSampler):
            def after_trial(self, *arguments: Any) -> None:
                after.append(resident_bytes())

        trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-3)},
            objective,
            n_trials=trials,
            backend="optuna",
            sampler=Reads(),
            pruner=Prunes(),
            catch=(RuntimeError,),
        )
    return after


def measure_in_process(library: str, trials: int) -> list[int]:
    command = [sys.executable, __file__, "--library", library, "--trials", str(trials)]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(f"{library} failed:\n{finished.stderr}")
    return json.loads(finished.stdout.splitlines()[-1])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="The head of the file says how to read the table."
    )
    parser.add_argument("--trials", type=int, default=20, help="trials of each search (default: 20)")
    parser.add_argument("--library", choices=LIBRARIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trials <= FIRST:
        parser.error(f"--trials must be above {FIRST}")
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if options.library:
        print(json.dumps(measure(options.library, options.trials)))
        return
    if not sys.platform.startswith("linux"):
        raise SystemExit("This benchmark reads resident memory from /proc, which Linux has.")
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "optuna", "transformers", "littrainer"))
    print(f"Python {platform.python_version()}, {libraries}; {platform.machine()}, one thread")
    of_a_trial = bytes_of_a_trial()
    print(f"\n{options.trials} trials; weights, gradients and optimizer of one take {of_a_trial / MIB:.0f} MiB\n")
    columns = (
        "side",
        f"largest after the first {FIRST}, MiB",
        "largest later, MiB",
        "after the last, MiB",
        "growth / trial",
    )
    print(f"| {' | '.join(columns)} |")
    print("| --- | ---: | ---: | ---: | ---: |")
    growth = {}
    for library in LIBRARIES:
        after = measure_in_process(library, options.trials)
        first, later, last = max(after[:FIRST]), max(after[FIRST:]), after[-1]
        growth[library] = (later - first) / of_a_trial
        print(f"| {library} | {first / MIB:.0f} | {later / MIB:.0f} | {last / MIB:.0f} | {growth[library]:.2f} |")
    is_met = growth["littrainer"] <= LARGEST_GROWTH
    verdict = "met   " if is_met else "MISSED"
    print(f"\n{verdict} growth of littrainer / trial: {growth['littrainer']:.3f}, at most {LARGEST_GROWTH}")
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()
