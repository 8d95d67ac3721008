"""What is loaded, and when: each list below is CPU time that every script, or every training, pays."""

from typing import Any

import pytest

import littrainer

from .compat.processes import facts_of

# The package, the redirection and the command line; then the names a script begins with; then the objects it makes.
COLLECT = """
import sys
before = set(sys.modules)
heavy = {"torch", "lightning", "transformers", "accelerate", "datasets", "numpy", "torchmetrics"}
# What makes a start slow that loads none of those.
slow = {"asyncio", "dataclasses", "importlib.resources", "inspect", "logging", "socket", "tempfile", "uuid"}

def loaded(names):
    return sorted(names & set(sys.modules) - before)

import littrainer
facts = {"package": loaded(heavy)}
import littrainer.auto
facts["auto"] = loaded(heavy)
facts["redirection"] = loaded(slow | {"argparse", "importlib.abc", "re", "typing"})
import littrainer.cli
facts["cli"] = loaded(heavy)
facts["command line"] = loaded(slow)
facts["listed"] = [name for name in littrainer.__all__ if name not in dir(littrainer)]
from littrainer import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments
facts["names of arguments"] = loaded(heavy)
facts["set_seed is in"] = littrainer.set_seed.__module__

import torch
of_torch = set(sys.modules)
from littrainer import Seq2SeqTrainer, Trainer
arguments = TrainingArguments("run", use_cpu=True, report_to=[], save_strategy="no", max_steps=1, disable_tqdm=True)
facts["trainer"] = sorted({name.partition(".")[0] for name in set(sys.modules) - of_torch} - sys.stdlib_module_names)
facts["compiler"] = loaded({"torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint"})
facts["modules of the trainer"] = len(set(sys.modules) - of_torch)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, labels):
        out = self.layer(x)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}

unused = {"accelerate", "datasets", "jsonargparse", "pandas", "scipy", "sklearn", "tensorboard", "transformers"}
rows = [{"x": torch.ones(2), "labels": torch.ones(1)} for _ in range(8)]
trainer = Trainer(Model(), arguments, train_dataset=rows, eval_dataset=rows)
trainer.train()
trainer.evaluate()
trainer.predict(rows)
facts["training"] = loaded(unused)
facts["strategies"] = loaded({f"littrainer.strategies.{name}" for name in ("sharded_v1", "tensor_parallel")})

import torchmetrics
facts["after import torchmetrics"] = loaded(unused)
facts["version"] = torchmetrics.__version__
facts["is a package"] = bool(torchmetrics.__path__)
facts["base class"] = torchmetrics.Metric is torchmetrics.metric.Metric in torchmetrics.Accuracy.__mro__
from torchmetrics.text import BERTScore
facts["kind"] = type(torchmetrics).__name__
facts["missing"] = hasattr(torchmetrics, "Acuracy")
import json
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return facts_of(COLLECT, tmp_path_factory.mktemp("imports"))


def test_importing_littrainer_loads_none_of_the_libraries_underneath(facts: Any) -> None:
    assert facts["package"] == facts["auto"] == facts["cli"] == facts["names of arguments"] == []
    assert facts["set_seed is in"] == "littrainer.seeds"
    assert facts["listed"] == []


def test_the_redirection_and_the_command_line_load_no_slow_part_of_the_standard_library(facts: Any) -> None:
    assert facts["redirection"] == []
    assert facts["command line"] == []


def test_trainer_and_arguments_load_torch_and_nothing_else(facts: Any) -> None:
    assert set(facts["trainer"]) <= {"littrainer", "tqdm"}
    assert facts["compiler"] == []


def test_trainer_and_arguments_are_few_modules_beside_those_of_torch(facts: Any) -> None:
    # About one millisecond each, where `import torch` is 1100 modules.
    assert facts["modules of the trainer"] < 330


def test_a_training_loads_no_library_that_it_does_not_use(facts: Any) -> None:
    assert facts["training"] == []
    assert facts["strategies"] == []


def test_torchmetrics_is_whole_when_a_script_uses_it_after_a_training(facts: Any) -> None:
    assert facts["after import torchmetrics"] == []
    assert facts["is a package"] and facts["base class"] and facts["version"]
    assert facts["kind"] == "module"
    assert not facts["missing"]


def test_every_public_name_can_be_had() -> None:
    missing = [name for name in littrainer.__all__ if not hasattr(littrainer, name)]
    assert missing == []


def test_a_name_that_littrainer_lacks_raises_attribute_error() -> None:
    assert not hasattr(littrainer, "Trainner")
