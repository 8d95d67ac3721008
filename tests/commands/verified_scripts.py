"""Runs `littrainer verify` on the examples: `python -m tests.commands.verified_scripts [EXAMPLE ...]`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.compat.processes import run_python
from tests.examples.small_settings import PROCESSES

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINER_EXAMPLES = [example for process in ("texts", "texts to texts") for example in PROCESSES[process]]
OPTIONS = {
    **{example.name: ["--output_dir", "out", *example.options.split()] for example in TRAINER_EXAMPLES},
    "data_parallel.py": ["--output_dir", "out", "--images", "128", "--epochs", "2"],
}
SCRIPT = """
import torch
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
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

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


def verify(folder: Path, script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, with at most eight steps."""
    folder.mkdir(exist_ok=True)
    return run_python("-m", "littrainer", "verify", "--steps", "8", str(script), *options, cwd=folder)


def is_equal(done: subprocess.CompletedProcess[str]) -> bool:
    """Return whether the command reported bitwise equality."""
    return done.returncode == 0 and done.stdout.startswith("equal, bit for bit: ")


def main(names: list[str]) -> None:
    """Verify examples, and print how many of them are equal."""
    equal = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names or OPTIONS:
            start = time.perf_counter()
            done = verify(Path(folder, name), EXAMPLES / name, *OPTIONS[name])
            equal += is_equal(done)
            output = done.stdout if is_equal(done) else f"WRONG: {done.stdout}{done.stderr}"
            print(f"{name} ({time.perf_counter() - start:.0f} s): {output}", flush=True)
    print(f"{equal} of {len(names or OPTIONS)} examples are equal")
    sys.exit(equal < len(names or OPTIONS))


if __name__ == "__main__":
    main(sys.argv[1:])
