"""Each example that a test runs, with settings that make it short, and what it has to print and to leave.

The examples of one process run one after the other in it: `PROCESSES` says which. A further example is a row there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from littrainer.search.record import find_best_trials, load_search_record


class Example(NamedTuple):
    """One example at a small setting.

    Parameters:
        name: of its file.
        options: behind it on the command line, besides `--output_dir out`.
        rows: what the rows of the table that it ends with are called, baselines first.
        columns: numbers in each of these rows.
        leaves: files in its output folder.
        prints: regular expressions that each match something on its standard output.
        also: what else is checked, with the folder that it ran in and its standard output.
    """

    name: str
    options: str
    rows: tuple[str, ...]
    columns: int = 1
    leaves: tuple[str, ...] = ("model.safetensors",)
    prints: tuple[str, ...] = (r"^model: +out",)
    also: Callable[[Path, str], None] | None = None


def rows_of(printed: str, example: Example) -> dict[str, list[float]]:
    """The numbers of the table at the end, by what a row is called."""
    found = {}
    for name in example.rows:
        match = re.search(rf"^{re.escape(name)} +(.+)$", printed, re.MULTILINE)
        found[name] = [float(number) for number in re.findall(r"\d+\.\d+", match[1])] if match else []
    return found


def the_search_is_recorded(folder: Path, printed: str) -> None:
    """The trial that the example trains with afterwards is the best one of the record in its folder."""
    (found,) = re.findall(r"^(\S+) \(trial (\d)\) +[01]\.\d{3}$", printed, re.MULTILINE)
    told = (folder / "stderr").read_text()
    assert len(re.findall(r"\] Trial \d (?:finished|pruned)", told)) == 3
    stored = load_search_record(folder / "out")
    (best,) = find_best_trials(stored.trials, stored.directions)
    assert len(stored.trials) == 3 and stored.backend == "optuna"
    assert found == (f"{best.parameters['learning_rate']:.2e}", best.id)
    assert f"trial {best.id}" in (folder / "out" / "report.html").read_text()


def the_adapters_are_those_that_were_trained(folder: Path, printed: str) -> None:
    """Loaded again and merged, they change the model's logits by no more than rounding; few parameters are theirs."""
    differences = [float(number) for number in re.findall(r"by at most (\S+)$", printed, re.MULTILINE)]
    assert len(differences) == 2 and max(differences) < 1e-4, printed
    (share,) = re.findall(r"^parameters: \d+, of which the adapters have \d+ \((\d+\.\d)%\)", printed, re.MULTILINE)
    assert 0 < float(share) < 25


PROCESSES: dict[str, tuple[Example, ...]] = {
    "texts": (
        Example(
            "text_classification.py",
            "--labels 2 --epochs 1",
            rows=("majority label", "this model"),
            columns=2,
            leaves=("model.safetensors", "curves.png", "trainer_state.json"),
            prints=(r"^labels: asyncio, email$",),
        ),
        Example(
            "causal_language_model.py",
            "--max_steps 4 --characters 60000 --vocabulary 400 --block 32",
            rows=("unigram model", "this model"),
            prints=(r"^def read\(self,", r"^model: +out "),
        ),
        Example(
            "masked_language_model.py",
            "--max_steps 4 --vocabulary 400 --whole_words true",
            rows=("most frequent token", "this model"),
        ),
        Example(
            "token_classification.py",
            "--max_steps 4 --functions 60 --vocabulary 400",
            rows=("role by name", "this model"),
            columns=2,
        ),
        Example(
            "multiple_choice.py",
            "--max_steps 4 --questions 40 --vocabulary 400",
            rows=("guessing", "most words in common", "this model"),
            prints=(r" \(right\)$", r"^model: +out "),
        ),
        Example(
            "hyperparameter_search.py",
            "--trials 3 --labels 2 --texts 160 --epochs 1",
            rows=("5.00e-05 (default)",),
            leaves=(),
            prints=(r"^trials: out$",),
            also=the_search_is_recorded,
        ),
    ),
    "texts to texts": (
        Example(
            "extractive_question_answering.py",
            "--max_steps 4 --questions 60 --vocabulary 400",
            rows=("most frequent answer", "this model"),
            columns=2,
            prints=(r"^  What .+\?  .*\(right: .+\)$", r"^model: +out "),
        ),
        Example(
            "summarization.py",
            "--max_steps 4 --docstrings 120 --vocabulary 400",
            rows=("beginning of the text", "this model"),
            columns=2,
            prints=(r"^  written: ", r"^model: +out "),
        ),
        Example(
            "translation.py",
            "--max_steps 4 --messages 120 --test_messages 20 --vocabulary 400",
            rows=("left in English", "this model"),
            columns=2,
            prints=(r"^Unicode names of Korean syllables .*: 120 messages to train on", r"^model: +out "),
        ),
        Example(
            "lora.py",
            "--max_steps 4 --pretraining_steps 4 --characters 20000 --vocabulary 400",
            rows=("without the adapters", "with the adapters"),
            leaves=("adapter_model.safetensors", "base/model.safetensors", "merged/model.safetensors"),
            prints=(r"^adapters: out ", r"^merged: +out/merged "),
            also=the_adapters_are_those_that_were_trained,
        ),
        Example(
            "digits.py",
            "--images 128 --epochs 2",
            rows=("logistic regression", "this model"),
        ),
    ),
    "on Lightning": (
        Example(
            "lightning_module.py",
            "--labels 2 --texts 160 --epochs 2",
            rows=("majority label", "this model"),
            columns=2,
            leaves=("model.safetensors", "checkpoints", "log/version_0/metrics.csv"),
            prints=(r'^".* \.\.\." comes from \w+$',),
        ),
        Example(
            "ema_and_profiler.py",
            "--labels 2 --texts 160 --epochs 2",
            rows=("majority label", "last weights", "averaged weights"),
            columns=2,
            prints=(r"^ +\d+\.\d\d +\d+  run_training_epoch$",),
        ),
    ),
}
