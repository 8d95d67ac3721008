from __future__ import annotations

import copy
import functools
import logging
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.trainer_utils import align_special_tokens as their_alignment

from littrainer.loop.model_preparation import (
    align_special_tokens,
    enable_activation_checkpointing,
)
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, tiny_tokenizer
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_gpt2, tiny_llama
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


class NewName(VectorClassifier):
    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: Any = None, **options: Any) -> None:
        self.keywords = (activation_checkpointing_kwargs, options)


class OldName(VectorClassifier):
    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        self.keywords = (gradient_checkpointing_kwargs, {})


class OldNameWithLayers(VectorClassifier):
    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, every_n_layers: int = 1) -> None:
        self.keywords = (gradient_checkpointing_kwargs, {"every_n_layers": every_n_layers})


KEYWORDS = {"use_reentrant": True, "every_n_layers": 3}


def get_keywords(folder: Path, model: Any, **changes: Any) -> Any:
    enable_activation_checkpointing(model, quiet_arguments(folder, **changes))
    return getattr(model, "keywords", None)


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_options_for_layers_are_separated_from_the_keywords_of_torch(tmp_path: Path, name: str) -> None:
    keywords = get_keywords(tmp_path, NewName(), **{name: True, f"{name}_kwargs": KEYWORDS})
    assert keywords == ({"use_reentrant": True}, {"every_n_layers": 3, "offload": False})
    assert get_keywords(tmp_path, NewName(), **{name: True}) == (None, {"every_n_layers": 1, "offload": False})
    assert get_keywords(tmp_path, NewName(), **{f"{name}_kwargs": KEYWORDS}) is None
    assert KEYWORDS == {"use_reentrant": True, "every_n_layers": 3}


@pytest.mark.parametrize("layers", [0, -1, 1.5, "two"])
def test_an_impossible_choice_of_layers_is_refused_by_name(tmp_path: Path, layers: Any) -> None:
    with pytest.raises(ValueError, match="every_n_layers"):
        quiet_trainer(tmp_path, gradient_checkpointing_kwargs={"every_n_layers": layers})


def test_a_model_with_the_old_method_gets_its_keywords_with_a_warning(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"gradient_checkpointing": True}
    with pytest.warns(FutureWarning, match="OldName only has gradient_checkpointing_enable"):
        torch_keywords = {"use_reentrant": True}
        keywords = get_keywords(tmp_path, OldName(), **arguments, gradient_checkpointing_kwargs=torch_keywords)
    assert keywords == ({"use_reentrant": True}, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments["gradient_checkpointing_kwargs"] = KEYWORDS
        assert get_keywords(tmp_path, OldNameWithLayers(), **arguments) == (torch_keywords, {"every_n_layers": 3})
        with pytest.raises(ValueError, match=r"every_n_layers=3.*OldName does not take"):
            get_keywords(tmp_path, OldName(), **arguments)


def test_a_model_without_either_method_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"VectorClassifier.*activation_checkpointing_enable"):
        quiet_trainer(tmp_path, gradient_checkpointing=True).train()


def test_a_keyword_that_checkpointing_does_not_take_is_refused_by_the_arguments_name(tmp_path: Path) -> None:
    wrong = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrent": False}}
    trainer = quiet_trainer(tmp_path, tiny_bert_classifier(), **wrong)
    with pytest.raises(ValueError, match=r"gradient_checkpointing_kwargs.*'use_reentrent'"):
        enable_activation_checkpointing(trainer.model, trainer.args)


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the calls of a fake liger-kernel, since the library needs a GPU."""
    calls: list[dict[str, Any]] = []
    library, kernels = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance = lambda **keywords: calls.append(keywords)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", library)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", kernels)
    return calls


def language_trainer(folder: Path, model: Any, **changes: Any) -> Any:
    rows = Rows(language_rows(4))
    return quiet_trainer(
        folder,
        model,
        trainer_kwargs={"train_dataset": rows, "eval_dataset": rows, "data_collator": pad_tokens},
        max_steps=1,
        **changes,
    )


def test_the_kernels_that_the_config_names_are_put_into_the_model(
    tmp_path: Path, applied: list[dict[str, Any]]
) -> None:
    model = tiny_llama()
    for is_enabled in (False, True):
        settings = {"use_liger_kernel": is_enabled, "liger_kernel_config": {"rope": False}}
        language_trainer(tmp_path, model, **settings).train()
        assert applied == [{"model": model, "rope": False}] * is_enabled


def test_liger_does_not_change_other_models_and_warns(
    tmp_path: Path, applied: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        quiet_trainer(tmp_path, max_steps=1, use_liger_kernel=True).train()
    assert applied == []
    assert "use_liger_kernel=True changes nothing" in caplog.text and "VectorClassifier" in caplog.text


def test_an_evaluation_of_the_loss_alone_skips_logits(tmp_path: Path, applied: list[dict[str, Any]]) -> None:
    flags: list[Any] = []
    model = tiny_llama()
    forward = model.forward

    @functools.wraps(forward)
    def record(**inputs: Any) -> Any:
        flags.append(inputs.pop("skip_logits", None))
        return forward(**inputs)

    trainer = language_trainer(tmp_path, model, use_liger_kernel=True)
    model.forward = record
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    assert set(flags[:2]) == {True} and set(flags[2:]) == {None}


def test_a_missing_library_is_named_with_the_way_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    trainer = language_trainer(tmp_path, tiny_llama(), use_liger_kernel=True)
    with pytest.raises(ImportError, match=r"use_liger_kernel=True.*pip install liger-kernel"):
        trainer.train()


def test_a_model_that_does_not_name_its_embeddings_is_refused_before_training(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, neftune_noise_alpha=5.0)
    with pytest.raises(ValueError, match=r"neftune_noise_alpha=5\.0.*VectorClassifier.*get_input_embeddings"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_debug_without_transformers_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.debug_utils", None)
    with pytest.raises(ImportError, match=r"debug='underflow_overflow' takes transformers.*pip install transformers"):
        quiet_trainer(tmp_path, debug="underflow_overflow").train()


TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")

# Tokens of the tokenizer, the model's config and its generation config.
CASES: list[tuple[dict[str, str], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {}),
    ({"eos_token": "[SEP]", "bos_token": "[CLS]"}, {}, {}),
    ({"eos_token": "[SEP]"}, {"eos_token_id": 3}, {"eos_token_id": 3}),
    ({"eos_token": "[SEP]"}, {"eos_token_id": 3}, {"eos_token_id": 7}),
    ({"eos_token": "[SEP]"}, {"eos_token_id": 7}, {"eos_token_id": [3, 7]}),
    ({"eos_token": "[SEP]"}, {"eos_token_id": [7, 3]}, {"eos_token_id": [7, 8]}),
    ({"eos_token": "[SEP]"}, {"eos_token_id": None, "pad_token_id": None}, {"eos_token_id": None}),
    ({"bos_token": "[CLS]"}, {"bos_token_id": 9}, {"bos_token_id": 9}),
]


def model_with(config: dict[str, Any], generation: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = tiny_gpt2()
    for name, value in config.items():
        setattr(model.config, name, value)
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    return model


def tokens_of(model: Any) -> list[Any]:
    return [getattr(config, name) for config in (model.config, model.generation_config) for name in TOKENS]


@pytest.mark.parametrize(("tokenizer", "config", "generation"), CASES, ids=range(len(CASES)))
def test_configs_get_the_same_special_tokens_as_in_transformers(
    tokenizer: dict[str, str], config: dict[str, Any], generation: dict[str, Any]
) -> None:
    processing_class = tiny_tokenizer()
    for name, value in tokenizer.items():
        setattr(processing_class, name, value)
    ours, theirs = model_with(config, generation), model_with(copy.deepcopy(config), copy.deepcopy(generation))
    align_special_tokens(ours, processing_class)
    their_alignment(theirs, processing_class)
    assert tokens_of(ours) == tokens_of(theirs)


def test_only_a_change_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = model_with({}, {})
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "[SEP]"
    align_special_tokens(model, tokenizer)
    assert "eos_token_id" in caplog.text
    caplog.clear()
    align_special_tokens(model, tokenizer)
    assert caplog.records == []
