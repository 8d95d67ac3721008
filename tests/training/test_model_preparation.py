from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from littrainer.training.model_preparation import enable_activation_checkpointing
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier
from tests.scenarios.trainers import quiet_trainer


class NewName(VectorClassifier):
    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: Any = None, **choices: Any) -> None:
        self.given = (activation_checkpointing_kwargs, choices)


class OldName(VectorClassifier):
    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        self.given = (gradient_checkpointing_kwargs, {})


class OldNameWithLayers(VectorClassifier):
    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, every_n_layers: int = 1) -> None:
        self.given = (gradient_checkpointing_kwargs, {"every_n_layers": every_n_layers})


KEYWORDS = {"use_reentrant": True, "every_n_layers": 3}


def given_to(folder: Path, model: Any, **changes: Any) -> Any:
    enable_activation_checkpointing(quiet_trainer(folder, model, **changes))
    return getattr(model, "given", None)


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_the_choice_of_layers_is_told_apart_from_the_keywords_of_torch(tmp_path: Path, name: str) -> None:
    given = given_to(tmp_path, NewName(), **{name: True, f"{name}_kwargs": KEYWORDS})
    assert given == ({"use_reentrant": True}, {"every_n_layers": 3, "offload": False})
    assert given_to(tmp_path, NewName(), **{name: True}) == (None, {"every_n_layers": 1, "offload": False})
    assert KEYWORDS == {"use_reentrant": True, "every_n_layers": 3}


@pytest.mark.parametrize("layers", [0, -1, 1.5, "two"])
def test_an_impossible_choice_of_layers_is_refused_by_name(tmp_path: Path, layers: Any) -> None:
    with pytest.raises(ValueError, match="every_n_layers"):
        quiet_trainer(tmp_path, gradient_checkpointing_kwargs={"every_n_layers": layers})


def test_keywords_alone_switch_nothing_on(tmp_path: Path) -> None:
    assert given_to(tmp_path, NewName(), gradient_checkpointing_kwargs=KEYWORDS) is None


def test_a_model_that_knows_the_old_name_gets_what_it_takes_and_a_warning(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="OldName only has gradient_checkpointing_enable"):
        given = given_to(
            tmp_path, OldName(), gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
        )
    assert given == ({"use_reentrant": True}, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keywords: dict[str, Any] = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": KEYWORDS}
        assert given_to(tmp_path, OldNameWithLayers(), **keywords) == ({"use_reentrant": True}, {"every_n_layers": 3})
        with pytest.raises(ValueError, match=r"every_n_layers=3.*OldName does not take"):
            given_to(tmp_path, OldName(), **keywords)


def test_a_model_without_either_method_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"VectorClassifier.*activation_checkpointing_enable"):
        quiet_trainer(tmp_path, gradient_checkpointing=True).train()


def test_a_keyword_that_checkpointing_does_not_take_is_refused_by_the_arguments_name(tmp_path: Path) -> None:
    wrong = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrent": False}}
    trainer = quiet_trainer(tmp_path, tiny_bert_classifier(), **wrong)
    with pytest.raises(ValueError, match=r"gradient_checkpointing_kwargs.*'use_reentrent'"):
        enable_activation_checkpointing(trainer)
