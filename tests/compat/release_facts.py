"""Facts about the release of transformers on the path: `python release_facts.py plain|redirected NAMES` prints them.

The file NAMES lists names by module.
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
    """Two layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def mock_ipython() -> None:
    """Make transformers.utils.notebook importable."""
    if importlib.util.find_spec("IPython") is None:
        package, display = ModuleType("IPython"), ModuleType("IPython.display")
        package.display = display  # type: ignore[attr-defined]
        sys.modules.update({"IPython": package, "IPython.display": display})


def describe_names(names_by_module: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Return full name -> defining module, and interface."""
    descriptions = {}
    for module_name, names in names_by_module.items():
        module = importlib.import_module(module_name)
        for name in names:
            if hasattr(module, name):
                value = getattr(module, name)
                home = getattr(value, "__module__", None) or type(value).__module__
                descriptions[f"{module_name}.{name}"] = {"home": home, **shape_of(value)}
    return descriptions


def train() -> dict[str, Any]:
    """Return logs and weights of a training with evaluations, checkpoints and the best checkpoint."""
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(4, generator=generator), "labels": index % 2} for index in range(14)]
    args = TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        # A multiple of eval_steps, since only some releases add an evaluation at the end.
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
    mock_ipython()
    import transformers

    facts = {"release": transformers.__version__, "names": describe_names(json.loads(Path(sys.argv[2]).read_text()))}
    facts["training"] = train()
    print(json.dumps(facts))
