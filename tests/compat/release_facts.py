"""Writes down what one process finds in the release of transformers that stands on its path, and how it trains.

`python release_facts.py plain|redirected NAMES`, where the file NAMES lists names by module.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

if sys.argv[1] == "redirected":
    import littrainer.auto  # noqa: F401

import torch
from shapes import shape_of


class Classifier(torch.nn.Module):
    """Two layers with dropout in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def pretend_that_ipython_is_installed() -> None:
    """Let transformers.utils.notebook be imported where it is not."""
    if importlib.util.find_spec("IPython") is None:
        package, display = ModuleType("IPython"), ModuleType("IPython.display")
        package.display = display  # type: ignore[attr-defined]
        sys.modules.update({"IPython": package, "IPython.display": display})


def names_found(listed: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Full name -> the module where it is defined, and its shape."""
    found = {}
    for module_name, names in listed.items():
        module = importlib.import_module(module_name)
        for name in names:
            if hasattr(module, name):
                value = getattr(module, name)
                home = getattr(value, "__module__", None) or type(value).__module__
                found[f"{module_name}.{name}"] = {"home": home, **shape_of(value)}
    return found


def training() -> dict[str, Any]:
    """Logs and weights of a training with evaluations, checkpoints and the best of them at the end."""
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(4, generator=generator), "labels": index % 2} for index in range(14)]
    args = TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        # Ends with an evaluation: the two releases do not agree on whether one is added where the training ends.
        max_steps=9,
        learning_rate=1e-2,
        warmup_steps=0.2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        load_best_model_at_end=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        Classifier(), args, train_dataset=rows, eval_dataset=rows[:5], callbacks=[EarlyStoppingCallback(3)]
    )
    trainer.train()
    logs = [
        {name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name}
        for entry in trainer.state.log_history
    ]
    return {"logs": logs, "weights": [parameter.tolist() for parameter in trainer.model.parameters()]}


if __name__ == "__main__":
    pretend_that_ipython_is_installed()
    import transformers

    facts = {"release": transformers.__version__, "names": names_found(json.loads(Path(sys.argv[2]).read_text()))}
    facts["training"] = training()
    print(json.dumps(facts))
