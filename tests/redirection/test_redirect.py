"""Imports from transformers after `import littrainer.auto`; a process collects the facts."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

import littrainer
from littrainer.redirection.redirect import RedirectFinder
from tests.compat.processes import facts_of

IMPORTS = {
    "from transformers import Trainer": "Trainer",
    "from transformers import TrainerCallback": "TrainerCallback",
    "import transformers": "transformers.Trainer",
    "import transformers as hf": "hf.trainer_utils.set_seed",
    "import transformers.trainer as t": "t.Trainer",
    "from transformers import trainer": "trainer.Trainer",
    "import importlib": "importlib.import_module('transformers.trainer').Trainer",
    "from importlib import import_module as load": "load('.training_args', 'transformers').TrainingArguments",
    "from transformers.trainer import TrainerCallback as Reexported": "Reexported",
    "from transformers.trainer_callback import IntervalStrategy as ForCallbacks": "ForCallbacks",
    "from transformers.trainer_seq2seq import Trainer as ForSeq2Seq": "ForSeq2Seq",
    "from transformers.integrations.integration_utils import TrainerCallback as Base": "Base",
    "from transformers.integrations import WandbCallback": "WandbCallback",
    "from transformers import TFTrainer": "TFTrainer",
    "import transformers as first_edition": "first_edition.TFTrainer",
    "from transformers.trainer_tf import TFTrainer as InItsModule": "InItsModule",
    "from transformers.training_args_tf import TFTrainingArguments as InTheirs": "InTheirs",
}

COLLECT = """
import littrainer.auto
import inspect, json, os, pickle, sys

IMPORTS = __IMPORTS__
facts = {}

def home(value):
    return getattr(value, "__module__", "")

def find_homes():
    homes = {}
    for statement, expression in IMPORTS.items():
        names = {}
        exec(statement, names)
        homes[statement] = home(eval(expression, names))
    return homes

def error_of(statement):
    try:
        exec(statement, {})
    except Exception as error:
        return [type(error).__name__, str(error)]

import transformers
first_package_object = transformers
facts["imports"] = find_homes()
import transformers.processing_utils
facts["package object was replaced"] = sys.modules["transformers"] is not first_package_object
facts["imports from the replaced package object"] = find_homes()
facts["first package object"] = home(first_package_object.Trainer)

from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, get_scheduler, pipeline

from littrainer.redirection.names import REPLACED
from littrainer.redirection.shim import ShimLoader
import transformers.trainer as trainer
facts["reexports"] = [trainer.is_sagemaker_mp_enabled is transformers.utils.is_sagemaker_mp_enabled,
                      trainer.DataCollatorWithPadding is DataCollatorWithPadding,
                      trainer.OPTIMIZER_NAME_BIN == "optimizer.bin", trainer.logger.name == "transformers.trainer",
                      trainer.np is sys.modules["numpy"], trainer.__version__ == transformers.__version__]
facts["transformers.trainer"] = [trainer.__file__, trainer.__spec__.name]
facts["dir"] = [name in dir(trainer) for name in ("Trainer", "TrainingArguments", "OPTIMIZER_NAME", "unwrap_model")]
facts["made-up name"] = [hasattr(trainer, "made_up"), hasattr(transformers, "made_up"), hasattr(trainer, "__made_up__")]
facts["keras is loaded"] = "keras" in sys.modules
facts["import of a made-up name"] = error_of("from transformers.trainer import made_up")

from transformers.integrations import NeptuneCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers import TrainerCallback, TrainingArguments
facts["derived"] = {cls.__name__: [home(cls), issubclass(cls, TrainerCallback)]
                    for cls in (NeptuneCallback, JITCheckpointCallback)}

from transformers.trainer_utils import TrainerMemoryTracker
facts["originals"] = [home(TrainerMemoryTracker),
                      pickle.loads(pickle.dumps(TrainerMemoryTracker)) is TrainerMemoryTracker,
                      inspect.getmodule(TrainerMemoryTracker) is sys.modules["transformers.trainer_utils"],
                      inspect.getsource(TrainerMemoryTracker).startswith("class TrainerMemoryTracker")]

stars = {}
exec("from transformers.trainer_utils import *", stars)
exec("from transformers.trainer import *", stars)
facts["star"] = [home(stars["Trainer"]), home(stars["set_seed"]),
                 stars["TrainerMemoryTracker"] is TrainerMemoryTracker, "_re_checkpoint" in stars]

from transformers.trainer_utils import SchedulerType
import torch
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
facts["get_scheduler"] = [type(get_scheduler(kind, optimizer, 1, 10)).__name__
                          for kind in ("linear", SchedulerType.COSINE)]

from transformers import Adafactor, Trainer
from transformers.trainer_jit_checkpoint import CheckpointManager

class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}

class AsksForCheckpoint(TrainerCallback):
    def on_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 1:
            listed.jit_manager.is_checkpoint_requested = True

arguments = TrainingArguments("out", use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", max_steps=4,
                              optim="adafactor", enable_jit_checkpoint=True, per_device_train_batch_size=1)
trainer = Trainer(Classifier(), arguments, train_dataset=[{"x": [0.5, 1.0, 2.0], "labels": 1}] * 4,
                  callbacks=[AsksForCheckpoint])
(listed,) = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, JITCheckpointCallback)]
facts["jit"] = [listed.trainer is trainer, isinstance(listed.jit_manager, CheckpointManager)]
trainer.train()
facts["adafactor"] = isinstance(trainer.optimizer, Adafactor)
facts["jit checkpoint"] = [trainer.state.global_step, sorted(os.listdir("out/checkpoint-2"))]
arguments.max_steps = 3
trainer.train(resume_from_checkpoint=True)
facts["resumed"] = [trainer.state.global_step, listed.jit_manager.is_checkpoint_requested]

loaders = [(name, getattr(sys.modules.get(name), "__loader__", None)) for name in REPLACED]
shims = [(name, loader) for name, loader in loaders if isinstance(loader, ShimLoader)]
facts["executed originals"] = [name for name, loader in shims if loader.original is not None]
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return facts_of(COLLECT.replace("__IMPORTS__", json.dumps(IMPORTS)), tmp_path_factory.mktemp("redirected"))


@pytest.mark.parametrize("when", ["imports", "imports from the replaced package object"])
def test_every_way_to_the_trainer_api_ends_in_littrainer(facts: Any, when: str) -> None:
    elsewhere = {statement: home for statement, home in facts[when].items() if home.partition(".")[0] != "littrainer"}
    assert len(facts[when]) == len(IMPORTS)
    assert elsewhere == {}


def test_shim_modules_behave_like_transformers_modules(facts: Any) -> None:
    assert facts["keras is loaded"] is False
    assert facts["package object was replaced"] and facts["first package object"] == "littrainer.trainer"
    unexecuted = {"trainer", "trainer_callback", "trainer_seq2seq", "training_args", "training_args_seq2seq"}
    assert unexecuted.isdisjoint(name.partition(".")[2] for name in facts["executed originals"])
    assert facts["reexports"] == [True] * 6 and facts["dir"] == [True] * 4
    path, name = facts["transformers.trainer"]
    assert path.endswith(os.path.join("transformers", "trainer.py")) and name == "transformers.trainer"
    assert facts["made-up name"] == [False, False, False]
    kind, message = facts["import of a made-up name"]
    assert kind == "ImportError" and "cannot import name 'made_up' from 'transformers.trainer'" in message
    assert facts["originals"] == ["transformers.trainer_utils", True, True, True]
    assert facts["star"] == ["littrainer.trainer", "littrainer.runtime.seeds", True, False]


def test_transformers_classes_work_with_ours(facts: Any) -> None:
    for home, derives_from_ours in facts["derived"].values():
        assert home.startswith("transformers.") and derives_from_ours
    assert facts["adafactor"]
    assert facts["get_scheduler"] == ["LambdaLR", "LambdaLR"]


def test_enable_jit_checkpoint_adds_transformers_callback(facts: Any) -> None:
    assert facts["jit"] == [True, True]
    step, files = facts["jit checkpoint"]
    assert step == 2 and "checkpoint-is-incomplete.txt" not in files
    assert facts["resumed"] == [3, False]


LATE = """
import json, os, sys, warnings
import transformers
import transformers.processing_utils
import transformers as current
from transformers import Trainer, TrainerCallback
from transformers.integrations import WandbCallback

class Mine(TrainerCallback):
    events = []
    def on_init_end(self, args, state, control, **kwargs):
        self.events.append("init_end")
    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        control.should_log = state.global_step == 2
        return control
    def on_log(self, args, state, control, logs, **kwargs):
        self.events.append(sorted(name for name in logs if "_" not in name))

callbacks = early, mine = transformers.EarlyStoppingCallback(2), Mine()
from littrainer.redirection.redirect import install
facts = {}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    install()
    after_once = [len(sys.meta_path), os.environ["PYTHONPATH"]]
    install()
facts["warnings"] = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
facts["withdrawn"] = [transformers.TFTrainingArguments.__module__, "TFTrainer" in dir(transformers)]
facts["twice changes nothing"] = after_once == [len(sys.meta_path), os.environ["PYTHONPATH"]]
from transformers import Trainer
from transformers.integrations import WandbCallback
import transformers.trainer
facts["homes"] = [Trainer.__module__, transformers.Trainer.__module__, current.Trainer.__module__,
                  transformers.trainer.Trainer.__module__, sys.modules["transformers.trainer"].Trainer.__module__,
                  WandbCallback.__mro__[1].__module__]

import torch

class Model(torch.nn.Linear):
    steps = 0
    def forward(self, x, labels=None):
        logits = super().forward(x)
        # A growing loss triggers early stopping.
        self.steps += 1
        return {"loss": torch.nn.functional.cross_entropy(logits, labels) * self.steps, "logits": logits}

rows = [{"x": torch.ones(2), "labels": 1}] * 8
args = transformers.TrainingArguments(
    "out", per_device_train_batch_size=1, max_steps=8, logging_steps=50, eval_strategy="steps", eval_steps=1,
    save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss",
    report_to="none", disable_tqdm=True, use_cpu=True,
)
trainer = Trainer(Model(2, 2), args, train_dataset=rows, eval_dataset=rows[:1], callbacks=list(callbacks))
trainer.train()
facts["callbacks"] = [trainer.state.global_step, early.early_stopping_patience_counter,
                      "EarlyStoppingCallback" in trainer.state.stateful_callbacks,
                      [callback in trainer.callback_handler.callbacks for callback in callbacks]]
facts["events"] = mine.events
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return facts_of(LATE, tmp_path_factory.mktemp("late"))


def test_names_imported_before_the_redirection_are_listed_in_a_warning(late: Any) -> None:
    assert len(late["warnings"]) == 1
    (message,) = late["warnings"]
    assert "Trainer (in __main__)" in message
    assert "TrainerCallback (in __main__)" in message
    assert "TrainerCallback (base of __main__.Mine)" in message
    assert "import littrainer.auto" in message


def test_imports_after_early_imports_are_redirected(late: Any) -> None:
    assert {home.partition(".")[0] for home in late["homes"]} == {"littrainer"}
    assert late["withdrawn"] == ["littrainer.keras.arguments", True]
    assert late["twice changes nothing"]


def test_callbacks_of_transformers_classes_receive_events_and_have_their_state_saved(late: Any) -> None:
    assert late["callbacks"] == [3, 2, True, [True, True]]
    assert late["events"][0] == "init_end" and ["epoch", "loss"] in late["events"]


def test_other_names_of_a_withdrawn_module_are_those_of_the_release(tmp_path: Path) -> None:
    (tmp_path / "training_args_tf.py").write_text("class TFTrainingArguments: pass\nclass Further: pass\n")
    name = "transformers.training_args_tf"
    spec = RedirectFinder().find_spec(name, [str(tmp_path)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TFTrainingArguments is littrainer.TFTrainingArguments
    assert module.Further.__module__ == name
    assert {"TFTrainingArguments", "Further"} < set(dir(module))
