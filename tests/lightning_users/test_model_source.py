from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import Trainer, TransformersCheckpointIO, TransformersModule, set_seed
from littrainer.checkpoint.lightning_format import MODULE_METADATA_KEY
from littrainer.lightning.model_source import call_model_factory, resolve_model
from tests.lightning_users.fitting import fit_module, loader, make_module
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_gpt2
from tests.scenarios.trainers import quiet_arguments

ARGS = {"learning_rate": 0.01, "weight_decay": 0.5}


def have_same_weights(module: Any, other: Any) -> bool:
    first, second = module.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("model_class", [None, "AutoModelForSequenceClassification", "BertModel"])
def test_a_name_is_loaded_by_its_configuration_or_the_given_class(tmp_path: Path, model_class: str | None) -> None:
    saved = tiny_bert_classifier()
    saved.save_pretrained(tmp_path / "model")
    for source in (str(tmp_path / "model"), tmp_path / "model"):
        loaded: Any = resolve_model(source, model_class)
        assert type(loaded).__name__ == ("BertModel" if model_class == "BertModel" else "BertForSequenceClassification")
        inner = getattr(loaded, "bert", loaded)
        assert torch.equal(inner.embeddings.word_embeddings.weight, saved.bert.embeddings.word_embeddings.weight)


def test_a_configuration_without_a_class_needs_model_class(tmp_path: Path) -> None:
    tiny_gpt2().config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"does not say which class its model has.*model_class="):
        resolve_model(str(tmp_path))
    with pytest.raises(ValueError, match="transformers has no model class 'AutoModle'"):
        resolve_model(str(tmp_path), "AutoModle")


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        (None, ValueError, r"needs a model.*load_from_checkpoint\(path, model=\.\.\.\)"),
        (3, TypeError, "The model is an int; give a torch.nn.Module"),
    ],
)
def test_other_sources_are_refused(source: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        resolve_model(source)
    with pytest.raises(TypeError, match=r"dict\(\), which is to make the model, returned a dict"):
        call_model_factory(dict)


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


def save(file: Path, module: TransformersModule, **keywords: Any) -> Path:
    """Train a module and save a checkpoint."""
    is_classifier = isinstance(module.model, VectorClassifier)
    fit_module(module, None if is_classifier else loader(language_rows(4), 2, pad_tokens), **keywords).save_checkpoint(
        file
    )
    return file


class Tokens:
    """A substitute for a tokenizer."""

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokens.txt").write_text("a b c")


def test_a_checkpoint_describes_the_module_in_plain_values_without_token(tmp_path: Path) -> None:
    module = make_module(tiny_gpt2(n_embd=8), {**ARGS, "hub_token": "hf_secret"})
    file = save(tmp_path / "x.ckpt", module, accumulate_grad_batches=2)
    assert b"hf_secret" not in file.read_bytes()
    loaded = TransformersModule.load_from_checkpoint(file)
    assert have_same_weights(loaded, module) and type(loaded.model) is type(module.model)
    assert loaded.args.learning_rate == 0.01 and loaded.args.weight_decay == 0.5
    changed = TransformersModule.load_from_checkpoint(file, args={"learning_rate": 0.5})
    assert changed.args.learning_rate == 0.5 and changed.args.weight_decay == 0
    checkpoint = torch.load(file, weights_only=True)
    mark = checkpoint[MODULE_METADATA_KEY]
    assert mark["version"] == 1 and mark["batches_per_epoch"] == 2 and mark["max_steps"] == 1
    assert mark["hyper_parameters"]["model"]["class"] == "GPT2LMHeadModel"
    # For loggers and LightningCLI.
    assert checkpoint["hyper_parameters"] == {"args": ARGS}
    json.dumps(mark)


def test_a_checkpoint_of_a_custom_model_needs_the_model(tmp_path: Path) -> None:
    module = make_module(args=ARGS)
    file = save(tmp_path / "x.ckpt", module)
    with pytest.raises(ValueError, match=r"load_from_checkpoint\(path, model=\.\.\.\)"):
        TransformersModule.load_from_checkpoint(file)
    for model in (VectorClassifier(), VectorClassifier):
        loaded = TransformersModule.load_from_checkpoint(file, model=model)
        assert have_same_weights(loaded, module) and loaded.args.weight_decay == 0.5


def test_a_model_that_was_loaded_by_name_is_restored_without_the_name(tmp_path: Path) -> None:
    tiny_gpt2().save_pretrained(tmp_path / "name")
    module = make_module(str(tmp_path / "name"))
    file = save(tmp_path / "x.ckpt", module)
    assert module.hparams["model"] == str(tmp_path / "name")
    (tmp_path / "name").rename(tmp_path / "elsewhere")
    assert have_same_weights(TransformersModule.load_from_checkpoint(file), module)


class ModelOption(TransformersModule):
    """A subclass that saves its model among its options."""

    def __init__(self, model: Any, hidden: int = 3) -> None:
        super().__init__(model, ARGS)
        self.save_hyperparameters()


class Small(TransformersModule):
    """A subclass that creates its model from an option."""

    def __init__(self, hidden: int = 4) -> None:
        super().__init__(VectorClassifier(hidden), ARGS)
        self.save_hyperparameters()


@pytest.mark.parametrize("make", [lambda: ModelOption(tiny_gpt2(), hidden=6), lambda: Small(hidden=6)])
def test_a_subclass_is_restored_from_its_options(tmp_path: Path, make: Any) -> None:
    set_seed(0)
    module = make()
    loaded: Any = type(module).load_from_checkpoint(save(tmp_path / "x.ckpt", module))
    assert have_same_weights(loaded, module) and loaded.hparams["hidden"] == 6


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was-run"),)

    torch.save({"state_dict": {}, "hyper_parameters": Runs()}, tmp_path / "x.ckpt")
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        TransformersModule.load_from_checkpoint(tmp_path / "x.ckpt")
    assert not (tmp_path / "was-run").exists()


# ---- Folders ---------------------------------------------------------------------------------------------------------


def test_an_exported_model_is_loaded_by_transformers_and_by_a_module(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    module, folder = make_module(tiny_gpt2(), ARGS, processing_class=Tokens()), tmp_path / "out" / "model"
    module.export_pretrained(folder, max_shard_size="2KB")
    assert (folder / "tokens.txt").is_file() and len(list(folder.glob("*.safetensors"))) > 1
    assert have_same_weights(AutoModelForCausalLM.from_pretrained(folder), module.model)
    assert have_same_weights(TransformersModule.load_from_checkpoint(folder), module)
    assert os.listdir(tmp_path / "out") == ["model"]


def test_an_export_that_fails_keeps_the_old_folder(tmp_path: Path) -> None:
    class FailingTokens(Tokens):
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("no more room")

    module = make_module(tiny_gpt2())
    module.export_pretrained(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    module.processing_class = FailingTokens()
    torch.nn.init.zeros_(module.model.lm_head.weight)
    with pytest.raises(OSError, match="no more room"):
        module.export_pretrained(tmp_path / "model")
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    with pytest.raises(ValueError, match="made in configure_model"):
        TransformersModule(VectorClassifier).export_pretrained(tmp_path / "other")


def test_a_folder_of_the_checkpoint_plugin_is_loaded_with_its_arguments(tmp_path: Path) -> None:
    class WithHead(TransformersModule):
        def __init__(self, model: Any = None, args: Any = None) -> None:
            super().__init__(model, args)
            self.head = torch.nn.Linear(1, 1)

    set_seed(0)
    module = WithHead(tiny_gpt2(), ARGS)
    loaded = WithHead.load_from_checkpoint(
        save(tmp_path / "folder", module, plugins=[TransformersCheckpointIO(module)])
    )
    assert have_same_weights(loaded, module) and loaded.args.weight_decay == 0.5


def test_a_checkpoint_of_a_trainer_is_loaded(tmp_path: Path) -> None:
    set_seed(0)
    args = quiet_arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    trainer = Trainer(VectorClassifier(), args, train_dataset=Rows(vector_rows(10)))
    trainer.train()
    loaded = TransformersModule.load_from_checkpoint(tmp_path / "checkpoint-2", model=VectorClassifier())
    assert have_same_weights(loaded.model, trainer.model)
    with pytest.raises(ValueError, match="needs a model"):
        TransformersModule.load_from_checkpoint(tmp_path / "checkpoint-2")
