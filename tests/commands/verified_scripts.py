"""Runs `littrainer verify` on the examples, and on scripts whose numbers depend on the Trainer.

    python -m tests.commands.verified_scripts [NAME ...]

NAME is an example, or a name in `PLANTED`. Prints a line for each, and the counts of equal examples and of detected
differences.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.compat.processes import run_python
from tests.examples.small_settings import PROCESSES

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINER_EXAMPLES = [example for process in ("texts", "texts to texts") for example in PROCESSES[process]]
OPTIONS = {
    **{example.name: ["--output_dir", "out", *example.options.split()] for example in TRAINER_EXAMPLES},
    "data_parallel.py": ["--output_dir", "out", "--images", "128", "--epochs", "2"],
}
SCRIPT = """
import random, torch
from transformers import Trainer, TrainerCallback, TrainingArguments

ON_LIGHTNING = Trainer.__module__.startswith("littrainer")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.dropout, self.head = torch.nn.Linear(6, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3)

    def forward(self, x, labels=None):
        logits = self.head(self.dropout(torch.relu(self.inner(x))))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

class Hook(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        #STEP
        pass

def compute_metrics(prediction):
    accuracy = float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())
    #METRICS
    return {"accuracy": accuracy}

torch.manual_seed(0)
rows = [{"x": torch.randn(6), "labels": number % 3} for number in range(40)]
args = TrainingArguments(
    "out", num_train_epochs=2, per_device_train_batch_size=4, learning_rate=0.01, report_to="none", use_cpu=True,
    eval_strategy="epoch", save_strategy="epoch", push_to_hub=False, disable_tqdm=True,
)
model = Model()
#BEFORE
trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows[:9], compute_metrics=compute_metrics,
                  callbacks=[Hook()])
trainer.train()
raise SystemExit("The script goes on after its training.")
"""


class Planted(NamedTuple):
    """Difference between the Trainers in a script.

    Parameters:
        at: the comment in `SCRIPT` that the code replaces.
        code: the replacement.
        pattern: pattern of the expected output.
    """

    at: str
    code: str
    pattern: str


PLANTED = {
    "another learning rate": Planted(
        "BEFORE",
        "args.learning_rate = 0.02 if ON_LIGHTNING else 0.01",
        r"first at step 1,[^$]*learning_rate: 0.01 with transformers, 0.02 with littrainer[^$]*"
        r"sets learning_rate to 0.01 with transformers and to 0.02",
    ),
    "other data": Planted(
        "BEFORE",
        "rows = rows[ON_LIGHTNING:] + rows[:ON_LIGHTNING]",
        r"first at step 1, after 0 equal values[^$]*loss: [^$]*the first loss",
    ),
    "other weights at step 6": Planted(
        "STEP",
        "if ON_LIGHTNING and state.global_step == 5: model.head.bias.data[0] += 0.5",
        r"first at step 6, after 20 equal values[^$]*loss: [^$]*a step in the middle",
    ),
    "another metric": Planted(
        "METRICS",
        "accuracy += 0.125 if ON_LIGHTNING else 0",
        r"eval_accuracy: [^$]*the evaluation alone",
    ),
    "numbers that are never the same": Planted(
        "BEFORE", "args.seed = random.SystemRandom().randrange(1000)", r"does not repeat"
    ),
}


def verify(folder: Path, script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, with at most eight steps."""
    folder.mkdir(exist_ok=True)
    return run_python("-m", "littrainer", "verify", "--steps", "8", str(script), *options, cwd=folder)


def is_equal(done: subprocess.CompletedProcess[str]) -> bool:
    """Return whether the command reported bitwise equality."""
    return done.returncode == 0 and done.stdout.startswith("equal, bit for bit: ")


def is_named(done: subprocess.CompletedProcess[str], planted: Planted) -> bool:
    """Return whether the command reported a planted difference with its numbers and cause."""
    return done.returncode == 1 and re.search(planted.pattern, done.stdout) is not None


def write_script(folder: Path, planted: Planted | None) -> Path:
    """Write the script, with a planted difference if not None."""
    folder.mkdir(exist_ok=True)
    code = SCRIPT if planted is None else SCRIPT.replace(f"#{planted.at}", planted.code)
    (folder / "train.py").write_text(code)
    return folder / "train.py"


def main(names: list[str]) -> None:
    """Verify examples and planted scripts, and print the counts."""
    counts = {"examples": [0, 0], "planted": [0, 0]}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or [*OPTIONS, *PLANTED]:
            start, path = time.perf_counter(), Path(folder, name)
            if name in OPTIONS:
                done = verify(path, EXAMPLES / name, *OPTIONS[name])
                kind, is_right = "examples", is_equal(done)
            else:
                done = verify(path, write_script(path, PLANTED[name]))
                kind, is_right = "planted", is_named(done, PLANTED[name])
            counts[kind][0] += is_right
            counts[kind][1] += 1
            output = done.stdout if is_right else f"{done.stdout}{done.stderr}"
            print(f"{name} ({time.perf_counter() - start:.0f} s): {'' if is_right else 'WRONG: '}{output}", flush=True)
    print("{} of {} examples are equal".format(*counts["examples"]))
    print("{} of {} planted differences are named".format(*counts["planted"]))
    sys.exit(any(right < all_ for right, all_ in counts.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
