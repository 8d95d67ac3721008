"""Loaded modules, and when: each list below costs every script, or every training, CPU time."""

from typing import Any

import pytest

import littrainer

from .compat.processes import facts_of

# 232 and room for a few.
MODULES_OF_TRAINER = 240

# The package, the redirection and the command line; then the names a script begins with; then the objects it makes.
COLLECT = """
import sys
before = set(sys.modules)
heavy = {"torch", "lightning", "transformers", "accelerate", "datasets", "numpy", "torchmetrics"}
# Slow causes of a start that loads none of these modules.
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
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()) as printed:
    for word in ("--version", "--help"):
        try:
            littrainer.cli.main([word])
        except SystemExit:
            pass
facts["version and help"] = [loaded(heavy | slow), len(printed.getvalue()) > 500]
facts["listed"] = [name for name in littrainer.__all__ if name not in dir(littrainer)]
from littrainer import Seq2SeqTrainingArguments, TrainingArguments
facts["names of arguments"] = loaded(heavy)
facts["set_seed is in"] = littrainer.set_seed.__module__

import torch
of_torch = set(sys.modules)
from littrainer import Seq2SeqTrainer, Trainer
arguments = TrainingArguments("run", use_cpu=True, report_to=[], save_strategy="no", max_steps=1, disable_tqdm=True)
facts["trainer"] = sorted({name.partition(".")[0] for name in set(sys.modules) - of_torch} - sys.stdlib_module_names)
facts["compiler"] = loaded({"torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint"})
facts["own modules of the trainer"] = sum(name.startswith("littrainer.") for name in set(sys.modules) - of_torch)

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
facts["strategies"] = loaded({f"littrainer.strategies.{name}" for name in ("fsdp1", "tensor_parallel")})


import cloudpickle, inspect, lightning.pytorch, torchmetrics
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as threads:
    facts["in threads"] = [*threads.map(lambda name: hasattr(torchmetrics, name), ("Accuracy", "MeanMetric"))]
from torchmetrics.aggregation import MeanMetric
facts["pickled"] = cloudpickle.loads(cloudpickle.dumps(torchmetrics)) is torchmetrics
facts["listed by torchmetrics"] = sorted(set(torchmetrics.__all__) - set(dir(torchmetrics)))
facts["classes of torchmetrics"] = len(inspect.getmembers(torchmetrics, inspect.isclass))
facts["version"] = torchmetrics.__version__
facts["is a package"] = bool(torchmetrics.__path__)
facts["base class"] = (
    lightning.pytorch.core.module.Metric is torchmetrics.Metric is torchmetrics.metric.Metric
    and torchmetrics.Metric in torchmetrics.Accuracy.__mro__
)
facts["part"] = MeanMetric is torchmetrics.MeanMetric
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
    assert facts["set_seed is in"] == "littrainer.runtime.seeds"
    assert facts["listed"] == []


def test_the_redirection_and_the_command_line_load_no_slow_part_of_the_standard_library(facts: Any) -> None:
    assert facts["redirection"] == []
    assert facts["command line"] == []
    assert facts["version and help"] == [[], True]


def test_trainer_and_arguments_load_torch_and_nothing_else(facts: Any) -> None:
    assert set(facts["trainer"]) <= {"littrainer", "tqdm"}
    assert facts["compiler"] == []


def test_trainer_and_arguments_are_few_modules_beside_those_of_torch(facts: Any) -> None:
    # About a millisecond each; releases of the standard library and tqdm add different numbers.
    assert facts["own modules of the trainer"] <= MODULES_OF_TRAINER


def test_a_training_loads_no_library_that_it_does_not_use(facts: Any) -> None:
    assert facts["training"] == []
    assert facts["strategies"] == []


def test_torchmetrics_is_whole_when_a_script_uses_it_after_a_training(facts: Any) -> None:
    assert facts["is a package"] and facts["base class"] and facts["part"] and facts["version"]
    assert facts["listed by torchmetrics"] == [] and facts["classes of torchmetrics"] > 50
    assert facts["pickled"] and facts["in threads"] == [True, True]
    assert facts["kind"] == "module"
    assert not facts["missing"]


def test_every_public_name_can_be_had() -> None:
    missing = [name for name in littrainer.__all__ if not hasattr(littrainer, name)]
    assert missing == []


def test_a_name_that_littrainer_lacks_raises_attribute_error() -> None:
    assert not hasattr(littrainer, "Trainner")
