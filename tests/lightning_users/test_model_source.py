from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer.lightning.model_source import description_of, made_at_once, made_by
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_gpt2


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
