"""Prerequisites of pages: the reader's model and data, scripts, folders of earlier trainings, a Hub."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.scenarios.data import Rows, tiny_tokenizer, token_rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import CLASSES, VectorClassifier, tiny_bert_classifier

Names = dict[str, Any]

SCRIPT = """
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 3)

    def forward(self, x, labels=None):
        logits = self.head(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


if __name__ == "__main__":
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    rows = [{"x": torch.tensor([index / 8, 1.0]), "labels": index % 3} for index in range(8)]
    trainer = Trainer(Classifier(), args, train_dataset=rows, eval_dataset=rows)
    print(trainer.train())
"""
SAYS_ITS_RANK = """
import os

if os.environ.get("WORLD_SIZE", "1") != "1":
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
    raise SystemExit
"""
COMMAND_LINE_OF_LIGHTNING = """
from lightning.pytorch.cli import LightningCLI

from littrainer import TrainerDataModule, TransformersModule


class MyDataModule(TrainerDataModule):
    def __init__(self):
        rows = [{"input_ids": [5, 6, 7, 8], "labels": label} for label in (0, 1, 2, 0)]
        super().__init__(rows, rows)


if __name__ == "__main__":
    LightningCLI(TransformersModule, MyDataModule)
"""


def model_and_data(folder: Path) -> Names:
    """A model of the reader's, datasets and a metric function."""
    return {
        "model": VectorClassifier(),
        "train_dataset": Rows(vector_rows(16)),
        "eval_dataset": Rows(vector_rows(8)),
        "compute_metrics": accuracy,
    }


def script(folder: Path) -> Names:
    """A script of the reader's."""
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    return {}


def script_for_several_processes(folder: Path) -> Names:
    """A script that says only which process it is where there are several, each of which would import everything.

    Trainings of several processes are in tests/distributed.
    """
    (folder / "train.py").write_text(SAYS_ITS_RANK + SCRIPT, encoding="utf-8")
    return {}


def script_and_data(folder: Path) -> Names:
    """A script of the reader's, and names that its excerpts refer to."""
    return {**script(folder), **model_and_data(folder)}


def script_and_trainer(folder: Path) -> Names:
    """A script of the reader's, and the Trainer of another."""
    from tests.scenarios.trainers import quiet_trainer

    return {**script(folder), "trainer": quiet_trainer("runs/in_a_script")}


def scenario_names(folder: Path) -> Names:
    """Imports of the files of scenarios."""
    from tests.fidelity.cases import saving

    return dict(vars(saving))


def lightning_module_and_checkpoint(folder: Path) -> Names:
    """A LightningModule with a model, and a checkpoint that a Trainer has written of such a model."""
    import lightning
    import torch

    from littrainer import Trainer, TrainingArguments

    class MyModule(lightning.LightningModule):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            decayed: list[Any] = [self.model.inner.weight, self.model.head.weight]
            changes: list[Any] = [
                parameter for parameter in self.model.parameters() if not any(parameter is other for other in decayed)
            ]
            groups: list[dict[str, Any]] = [{"params": decayed}, {"params": changes, "weight_decay": 0.0}]
            return torch.optim.AdamW(groups)

    rows = Rows(vector_rows(500))
    args = TrainingArguments("runs", max_steps=500, per_device_train_batch_size=2, report_to="none", disable_tqdm=True)
    Trainer(VectorClassifier(), args, train_dataset=rows).train()
    return {
        "MyModule": MyModule,
        "model": VectorClassifier(),
        "tokenizer": tiny_tokenizer(),
        "loader": torch.utils.data.DataLoader(rows, batch_size=2),
    }


def hub_on_this_machine(folder: Path) -> Names:
    """A Hub to which the reader is logged in; the process ends with it."""
    from tests.hub.client import turn_client_to
    from tests.hub.server import GOOD_TOKEN, serving

    running = contextlib.ExitStack()
    hub = running.enter_context(serving())
    atexit.register(running.close)
    hub.tokens = {GOOD_TOKEN: "me"}
    home = folder.parent / "home"
    home.mkdir()
    turn_client_to(hub, home, pytest.MonkeyPatch())
    os.environ["HF_TOKEN"] = GOOD_TOKEN
    return {**model_and_data(folder), "hub_on_this_machine": hub}


def model_on_the_disk_for_a_search(folder: Path) -> Names:
    """A very small model under the name that the page loads; what Ray and a sweep would start is not started."""
    tiny_bert_classifier().save_pretrained(folder / "bert-base-uncased")

    def f1(prediction: Any) -> dict[str, float]:
        """F1 of probabilities, by which very short trainings differ."""
        exponentials = np.exp(prediction.predictions)
        likely = exponentials / exponentials.sum(axis=-1, keepdims=True)
        right = np.eye(CLASSES)[prediction.label_ids]
        return {"f1": float(np.mean(2 * (likely * right).sum(axis=0) / (likely + right).sum(axis=0)))}

    _keep_ray_to_its_keywords()
    _keep_sweeps_to_this_machine(folder)
    rows = token_rows(24, shortest=6, longest=6)
    return {"train_dataset": Rows(rows[:16]), "eval_dataset": Rows(rows[16:]), "compute_metrics": f1}


def _keep_ray_to_its_keywords() -> None:
    """Draw from the space and check everything that is checked before the first trial.

    A search on Ray starts processes that import everything: tests/search/test_ray_backend.py runs it.
    """
    from ray import tune

    signature = inspect.signature(tune.run)

    def run(trainable: Any, config: dict[str, Any], num_samples: int, **keywords: Any) -> Any:
        signature.bind(trainable, config=config, num_samples=num_samples, **keywords)
        drawn = {name: domain.sample() for name, domain in config.items()}
        result = {"objective": 0.0}
        best = SimpleNamespace(
            trial_id="0", status="TERMINATED", config=drawn, last_result=result, is_finished=lambda: False
        )
        return SimpleNamespace(trials=[best], get_best_trial=lambda *given: best)

    pytest.MonkeyPatch().setattr(tune, "run", run)


def _keep_sweeps_to_this_machine(folder: Path) -> None:
    """A sweep without a server, of two runs that are kept on the disk."""
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(folder))
    import wandb

    from tests.search.test_wandb_sweep import Server

    server = Server()
    agent = server.agent

    def two_runs(*arguments: Any, **keywords: Any) -> None:
        agent(*arguments, **{**keywords, "count": min(keywords["count"], 2)})

    patch = pytest.MonkeyPatch()
    patch.setattr(wandb, "sweep", server.sweep)
    patch.setattr(wandb, "agent", two_runs)


def runs_offline(folder: Path) -> Names:
    """A training whose runs in Weights & Biases stay on the disk."""
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(folder))
    return model_and_data(folder)


def command_line_of_lightning(folder: Path) -> Names:
    """A script of Lightning's command line, and a very small model under the name that it is given."""
    (folder / "train.py").write_text(COMMAND_LINE_OF_LIGHTNING, encoding="utf-8")
    tiny_bert_classifier().save_pretrained(folder / "google-bert" / "bert-base-uncased")
    return {}


PREPARATIONS: dict[str, Callable[[Path], Names]] = {
    "CONTRIBUTING.md": scenario_names,
    "README.md": script_and_data,
    "docs/callbacks.md": model_and_data,
    "docs/check.md": script_and_trainer,
    "docs/checkpoint-exchange.md": lightning_module_and_checkpoint,
    "docs/api/command-line.md": script_for_several_processes,
    "docs/errors.md": script,
    "docs/hub.md": hub_on_this_machine,
    "docs/index.md": script_and_data,
    "docs/lightning.md": command_line_of_lightning,
    "docs/search.md": model_on_the_disk_for_a_search,
    "docs/tracking.md": runs_offline,
}
"""page -> writes what it takes for granted into its folder, and returns the names that it takes for granted."""
