"""Tracker callbacks as scripts and libraries take them from transformers, in one process with the redirection."""

from pathlib import Path
from typing import Any

import pytest

from tests.compat.processes import facts_of

SCRIPT = """
import littrainer.auto
import json
import torch
from transformers import Trainer, TrainingArguments
from transformers.integrations import (
    CodeCarbonCallback,
    MLflowCallback,
    TensorBoardCallback,
    WandbCallback,
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
    is_wandb_available,
)
from transformers.integrations.integration_utils import KubeflowCallback, rewrite_logs
from transformers.trainer_callback import TrainerCallback


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, labels=None):
        return {"loss": (self.layer(x) - labels).pow(2).mean()}


class OwnSetup(WandbCallback):
    def setup(self, args, state, model, **kwargs):
        self._initialized = True
        facts["own setup"] = [type(self._wandb).__name__, model is not None, sorted(kwargs)]

    def on_log(self, args, state, control, **kwargs):
        pass


facts = {
    "all": get_available_reporting_integrations(),
    "classes": [found.__module__ for found in get_reporting_integration_callbacks(["wandb", "mlflow"])],
    "names": rewrite_logs({"loss": 1, "eval_loss": 2}),
    "of transformers": [KubeflowCallback.__module__, issubclass(KubeflowCallback, TrainerCallback)],
    "wandb": is_wandb_available(),
}
row = {"x": torch.ones(2), "labels": torch.ones(1)}
args = TrainingArguments("out", max_steps=1, report_to=["tensorboard", "mlflow"], use_cpu=True, save_strategy="no")
trainer = Trainer(Model(), args, train_dataset=[row] * 4, callbacks=[OwnSetup()])
trainer.remove_callback(MLflowCallback)
handler = trainer.callback_handler
facts["kinds"] = [
    kind.__name__
    for kind in (CodeCarbonCallback, MLflowCallback, TensorBoardCallback, WandbCallback)
    if any(isinstance(callback, kind) for callback in handler.callbacks)
]
trainer.train()
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("script")
    found = facts_of(SCRIPT, folder, TENSORBOARD_LOGGING_DIR="events", WANDB_MODE="disabled")
    return {**found, "events": len(list(Path(folder, "events").iterdir()))}


def test_transformers_names_of_callbacks_are_those_that_report_to_makes(facts: Any) -> None:
    assert facts["kinds"] == ["TensorBoardCallback", "WandbCallback"]
    assert facts["classes"] == ["littrainer.tracking.wandb", "littrainer.tracking.mlflow"]
    assert facts["events"] == 1


def test_a_subclass_that_overrides_setup_is_called_as_in_transformers(facts: Any) -> None:
    module, has_model, keywords = facts["own setup"]
    assert (module, has_model) == ("module", True)
    assert {"processing_class", "optimizer", "lr_scheduler", "train_dataloader"} <= set(keywords)


def test_functions_about_trackers_are_there(facts: Any) -> None:
    assert {"tensorboard", "wandb", "mlflow", "trackio"} <= set(facts["all"])
    assert facts["names"] == {"train/loss": 1, "eval/loss": 2}
    assert facts["wandb"] is True
    assert facts["of transformers"] == ["transformers.integrations.integration_utils", True]
