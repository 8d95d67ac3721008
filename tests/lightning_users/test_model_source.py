from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from littrainer import Trainer, TransformersCheckpointIO, TransformersModule, set_seed
from littrainer.checkpoint.lightning_format import MARK
from littrainer.lightning.model_source import description_of, made_at_once, made_by
from tests.lightning_users.fitting import fitted, loader, module_of, trainer_for
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_gpt2
from tests.scenarios.trainers import quiet_arguments


def test_a_module_is_the_model() -> None:
    model = VectorClassifier()
    assert made_at_once(model) is model


@pytest.mark.parametrize("model_class", [None, "AutoModelForSequenceClassification", "BertModel"])
def test_a_name_is_loaded_as_its_configuration_or_the_caller_says(tmp_path: Path, model_class: str | None) -> None:
    saved = tiny_bert_classifier()
    saved.save_pretrained(tmp_path / "model")
    for source in (str(tmp_path / "model"), tmp_path / "model"):
        loaded: Any = made_at_once(source, model_class)
        assert type(loaded).__name__ == ("BertModel" if model_class == "BertModel" else "BertForSequenceClassification")
        inner = getattr(loaded, "bert", loaded)
        assert torch.equal(inner.embeddings.word_embeddings.weight, saved.bert.embeddings.word_embeddings.weight)


def test_a_configuration_without_a_class_asks_for_one(tmp_path: Path) -> None:
    tiny_gpt2().config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"does not say which class its model has.*model_class="):
        made_at_once(str(tmp_path))
    with pytest.raises(ValueError, match="transformers has no model class 'AutoModle'"):
        made_at_once(str(tmp_path), "AutoModle")


def test_a_description_makes_a_model_of_the_same_shape() -> None:
    model = tiny_gpt2(n_embd=8)
    description = description_of(model, "some/name")
    assert description is not None and description["name"] == "some/name"
    made = made_at_once(description)
    assert type(made) is type(model)
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_a_model_of_a_script_has_no_description() -> None:
    class Own(type(tiny_gpt2())):  # type: ignore[misc]
        pass

    assert description_of(VectorClassifier()) is None and description_of(None) is None
    assert description_of(Own(tiny_gpt2().config)) is None


def test_a_function_is_called_later_and_has_to_make_a_model() -> None:
    assert made_at_once(VectorClassifier) is None
    assert isinstance(made_by(VectorClassifier), VectorClassifier)
    with pytest.raises(TypeError, match=r"dict\(\), which is to make the model, returned a dict"):
        made_by(dict)


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        (None, ValueError, r"needs a model.*load_from_checkpoint\(path, model=\.\.\.\)"),
        (3, TypeError, "The model is an int; give a torch.nn.Module"),
        ({"class": "GPT2LMHeadModel"}, ValueError, "needs 'class'.*and 'config'.*this one has 'class'"),
    ],
)
def test_anything_else_is_no_model(source: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        made_at_once(source)


ARGS = {"learning_rate": 0.01, "weight_decay": 0.5}


def same_weights(one: Any, other: Any) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def trained_language_model(**keywords: Any) -> Any:
    module = module_of(tiny_gpt2(), {**ARGS, "hub_token": "hf_secret"})
    return module, fitted(module, loader(language_rows(4), 2, pad_tokens), **keywords)


class Tokens:
    """In the place of a tokenizer."""

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokens.txt").write_text("a b c")


def test_a_checkpoint_says_how_to_make_the_module_and_holds_no_token(tmp_path: Path) -> None:
    module, trainer = trained_language_model()
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert b"hf_secret" not in (tmp_path / "x.ckpt").read_bytes()
    loaded = TransformersModule.load_from_checkpoint(tmp_path / "x.ckpt")
    assert same_weights(loaded, module) and type(loaded.model) is type(module.model)
    assert loaded.args.learning_rate == 0.01 and loaded.args.weight_decay == 0.5
    changed = TransformersModule.load_from_checkpoint(tmp_path / "x.ckpt", args={"learning_rate": 0.5})
    assert changed.args.learning_rate == 0.5 and changed.args.weight_decay == 0


def test_a_checkpoint_is_plain_and_known_by_its_mark(tmp_path: Path) -> None:
    _, trainer = trained_language_model(accumulate_grad_batches=2)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    mark = checkpoint[MARK]
    assert mark["version"] == 1 and mark["batches_per_epoch"] == 2 and mark["max_steps"] == 1
    assert mark["hyper_parameters"]["model"]["class"] == "GPT2LMHeadModel"
    # What loggers show and LightningCLI reads.
    assert checkpoint["hyper_parameters"] == {"args": ARGS}
    json.dumps(mark)


def test_a_checkpoint_is_written_without_a_training_too(tmp_path: Path) -> None:
    module, trainer = module_of(tiny_gpt2()), trainer_for()
    trainer.validate(module, loader(language_rows(4), 2, pad_tokens), verbose=False)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)[MARK]["max_steps"] is None
    assert same_weights(TransformersModule.load_from_checkpoint(tmp_path / "x.ckpt"), module)


def test_a_checkpoint_of_a_scripts_own_model_needs_the_model(tmp_path: Path) -> None:
    module = module_of(args=ARGS)
    fitted(module).save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"load_from_checkpoint\(path, model=\.\.\.\)"):
        TransformersModule.load_from_checkpoint(tmp_path / "x.ckpt")
    for model in (VectorClassifier(), VectorClassifier):
        loaded = TransformersModule.load_from_checkpoint(tmp_path / "x.ckpt", model=model)
        assert same_weights(loaded, module) and loaded.args.weight_decay == 0.5


def test_a_model_that_was_loaded_by_name_is_made_without_that_name(tmp_path: Path) -> None:
    tiny_gpt2().save_pretrained(tmp_path / "name")
    module = module_of(str(tmp_path / "name"))
    trainer = fitted(module, loader(language_rows(4), 2, pad_tokens))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert module.hparams["model"] == str(tmp_path / "name")
    (tmp_path / "name").rename(tmp_path / "elsewhere")
    assert same_weights(TransformersModule.load_from_checkpoint(tmp_path / "x.ckpt"), module)


def test_a_subclass_that_keeps_its_model_among_its_options_writes_no_object(tmp_path: Path) -> None:
    class Keeps(TransformersModule):
        def __init__(self, model: Any, width: int = 3) -> None:
            super().__init__(model, ARGS)
            self.save_hyperparameters()

    set_seed(0)
    module = Keeps(tiny_gpt2(), width=5)
    fitted(module, loader(language_rows(4), 2, pad_tokens)).save_checkpoint(tmp_path / "x.ckpt")
    loaded = Keeps.load_from_checkpoint(tmp_path / "x.ckpt")
    assert same_weights(loaded, module) and loaded.hparams["width"] == 5


def test_a_checkpoint_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was-run"),)

    torch.save({"state_dict": {}, "hyper_parameters": Runs()}, tmp_path / "x.ckpt")
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        TransformersModule.load_from_checkpoint(tmp_path / "x.ckpt")
    assert not (tmp_path / "was-run").exists()


def test_an_exported_model_is_loaded_by_transformers_and_by_a_module(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    module, _ = trained_language_model()
    module.processing_class = Tokens()
    module.export_pretrained(tmp_path / "out" / "model", max_shard_size="2KB")
    assert (tmp_path / "out" / "model" / "tokens.txt").is_file()
    assert len(list((tmp_path / "out" / "model").glob("*.safetensors"))) > 1
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model"), module.model)
    assert same_weights(TransformersModule.load_from_checkpoint(tmp_path / "out" / "model"), module)
    assert os.listdir(tmp_path / "out") == ["model"]


def test_an_export_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    class Broken(Tokens):
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("no more room")

    module, _ = trained_language_model()
    module.export_pretrained(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    module.processing_class = Broken()
    torch.nn.init.zeros_(module.model.lm_head.weight)
    with pytest.raises(OSError, match="no more room"):
        module.export_pretrained(tmp_path / "model")
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


def test_a_model_that_is_not_made_yet_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="made in configure_model"):
        TransformersModule(VectorClassifier).export_pretrained(tmp_path / "model")


def test_a_folder_of_the_checkpoint_plugin_is_loaded_with_its_arguments(tmp_path: Path) -> None:
    class WithHead(TransformersModule):
        def __init__(self, model: Any = None, args: Any = None) -> None:
            super().__init__(model, args)
            self.head = torch.nn.Linear(1, 1)

    set_seed(0)
    module = WithHead(tiny_gpt2(), ARGS)
    trainer = fitted(module, loader(language_rows(4), 2, pad_tokens), plugins=[TransformersCheckpointIO(module)])
    trainer.save_checkpoint(tmp_path / "folder")
    loaded = WithHead.load_from_checkpoint(tmp_path / "folder")
    assert same_weights(loaded, module) and loaded.args.weight_decay == 0.5


def test_a_subclass_is_made_from_options_of_its_own(tmp_path: Path) -> None:
    class Small(TransformersModule):
        def __init__(self, hidden: int = 4) -> None:
            super().__init__(VectorClassifier(hidden), ARGS)
            self.save_hyperparameters()

    set_seed(0)
    module = Small(hidden=6)
    fitted(module).save_checkpoint(tmp_path / "x.ckpt")
    assert dict(module.hparams) == {"hidden": 6}
    assert same_weights(Small.load_from_checkpoint(tmp_path / "x.ckpt"), module)


def test_a_checkpoint_of_a_trainer_is_loaded(tmp_path: Path) -> None:
    set_seed(0)
    args = quiet_arguments(tmp_path / "run", max_steps=2, save_strategy="steps", save_steps=2)
    trainer = Trainer(VectorClassifier(), args, train_dataset=Rows(vector_rows(10)))
    trainer.train()
    loaded = TransformersModule.load_from_checkpoint(tmp_path / "run" / "checkpoint-2", model=VectorClassifier())
    assert same_weights(loaded.model, trainer.model)
    with pytest.raises(ValueError, match="needs a model"):
        TransformersModule.load_from_checkpoint(tmp_path / "run" / "checkpoint-2")


def test_a_training_goes_on_from_a_checkpoint_of_its_module(tmp_path: Path) -> None:
    def rows() -> Any:
        return loader(vector_rows(8))

    module = module_of(args={**ARGS, "optim": "adamw_torch"})
    fitted(module, rows(), max_epochs=2)
    half = module_of(args={**ARGS, "optim": "adamw_torch"})
    trainer = trainer_for(max_epochs=2, max_steps=-1)

    class Stops(Exception):
        pass

    class SavesAndStops(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "half.ckpt")
            raise Stops

    with pytest.raises(Stops):
        fitted(half, rows(), max_epochs=2, callbacks=[SavesAndStops()])
    resumed = module_of(args={**ARGS, "optim": "adamw_torch"})
    trainer.fit(resumed, rows(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert same_weights(resumed, module) and trainer.global_step == 4
