"""A script with a search in two processes, whose trials succeed, fail, are killed and take too long.

Run as `littrainer run trial_processes_script.py FOLDER`; Ctrl-C ends the search once FOLDER/waiting exists.
"""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments


@dataclass
class ScriptArguments(TrainingArguments):
    factor: float = 1.0


class Rows(torch.utils.data.Dataset):
    def __init__(self, seed):
        self.x = torch.randn(12, 4, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": index % 2}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x, labels=None):
        logits = self.inner(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class DoesNotFit(ValueError):
    def __init__(self, name, number):
        super().__init__(f"{name} of {number} does not fit")


class ScriptTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = self.args.factor * loss
        return (loss, outputs) if return_outputs else loss


def model_init(trial):
    if trial is None:
        return Model()
    trial.set_user_attr("process", os.getpid())
    trial.set_user_attr("trainer", transformers.Trainer.__module__)
    trial.set_user_attr("seen", [os.getcwd(), torch.get_num_threads()])
    if trial.number == 1:
        raise DoesNotFit("width", 7)
    if trial.number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if trial.number == 3:
        Path("waiting").touch()
        time.sleep(600)
    return Model()


def main(folder):
    trainer = ScriptTrainer(
        model_init=model_init,
        args=ScriptArguments(
            os.path.join(folder, "out"),
            use_cpu=True,
            max_steps=3,
            save_steps=3,
            eval_strategy="steps",
            eval_steps=2,
            report_to="none",
            factor=2.0,
        ),
        train_dataset=Rows(0),
        eval_dataset=Rows(1),
    )
    interrupted = False
    try:
        trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1)},
            compute_objective=lambda metrics: metrics["eval_loss"],
            n_trials=4,
            n_jobs=2,
            storage=f"sqlite:///{folder}/study.db",
            study_name="several",
        )
    except KeyboardInterrupt:
        interrupted = True
    record = json.loads(Path(folder, "out", "hyperparameter_search.json").read_text())
    trainer.args.learning_rate = record["trials"][0]["parameters"]["learning_rate"]
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    print(json.dumps({"interrupted": interrupted, "alone": losses[-1], "folder": os.getcwd()}))


if __name__ == "__main__":
    main(sys.argv[1])
