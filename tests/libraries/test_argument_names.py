"""No argument of ours switches something on that a library's subclass has given the same name."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess

import transformers

from littrainer import Seq2SeqTrainingArguments
from tests.libraries.sides import LIMIT_SECONDS, PYTHON, SHOWN_CHARACTERS, needs_libraries

# Prints the fields of each class of arguments or settings in the libraries, under transformers' own Trainer.
PROGRAM = """
import contextlib, dataclasses, importlib, json, pkgutil
import transformers

known = {field.name for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
found = {}
for package in ("trl", "sentence_transformers", "setfit", "peft"):
    home = importlib.import_module(package)
    for module in pkgutil.walk_packages(home.__path__, f"{package}.", onerror=lambda name: None):
        if not module.name.endswith(("config", "args", "arguments")):
            continue
        # Some need a further library.
        with contextlib.suppress(ImportError):
            for name, kind in vars(importlib.import_module(module.name)).items():
                if isinstance(kind, type) and kind.__module__.startswith(package) and dataclasses.is_dataclass(kind):
                    fields = {field.name for field in dataclasses.fields(kind)}
                    found[f"{kind.__module__}.{name}"] = sorted(fields - known)
print(json.dumps(found))
"""
# Our argument -> why it may be a field of a library's class too.
SAME_MEANING = {
    "warmup_ratio": "sentence-transformers keeps the argument of earlier releases of transformers, as is done here",
    "logging_dir": "setfit keeps the argument of earlier releases of transformers, as is done here",
}


@needs_libraries
def test_no_argument_of_ours_is_a_field_of_a_librarys_class() -> None:
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [PYTHON, "-c", PROGRAM], capture_output=True, text=True, timeout=LIMIT_SECONDS, env={**os.environ, **settings}
    )
    assert run.returncode == 0, run.stderr[-SHOWN_CHARACTERS:]
    fields: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    read = {name.rpartition(".")[2] for name in fields}
    assert {"SFTConfig", "GRPOConfig", "SentenceTransformerTrainingArguments", "LoraConfig"} <= read
    assert "setfit.training_args.TrainingArguments" in fields
    theirs = {field.name for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    ours = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)} - theirs
    shared = {f"{kind}.{name}" for kind, names in fields.items() for name in ours.intersection(names)}
    unexplained = {one for one in shared if one.rpartition(".")[2] not in SAME_MEANING}
    assert not unexplained, "Rename it: a subclass's field would switch on a feature here."
    assert SAME_MEANING.keys() <= {one.rpartition(".")[2] for one in shared}, "No library has it any more."
