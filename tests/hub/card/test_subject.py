from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from littrainer.hub.card.subject import Given, subject_of, tags_of
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_gpt2
from tests.scenarios.trainers import quiet_trainer

datasets = pytest.importorskip("datasets")


def about(folder: Path, model: Any = None, given: dict[str, Any] | None = None, **keywords: Any) -> Any:
    return subject_of(quiet_trainer(folder / "my-model", model, given=keywords), Given(**(given or {})))


def test_the_card_is_named_after_the_output_folder(tmp_path: Path) -> None:
    assert about(tmp_path).name == "my-model"
    assert about(tmp_path, given={"model_name": "other"}).name == "other"


def test_a_model_of_another_class_than_transformers_names_no_library(tmp_path: Path) -> None:
    assert about(tmp_path).library is None
    assert about(tmp_path, tiny_bert_classifier()).library == "transformers"


def test_the_task_follows_from_the_class(tmp_path: Path) -> None:
    assert about(tmp_path).tasks == ()
    assert about(tmp_path, tiny_bert_classifier()).tasks == ("text-classification",)
    assert about(tmp_path, tiny_gpt2()).tasks == ("text-generation",)
    assert about(tmp_path, tiny_gpt2(), {"tasks": "fill-mask"}).tasks == ("fill-mask",)


def test_a_folder_is_no_base_model_on_the_hub(tmp_path: Path) -> None:
    for folder in (str(tmp_path), "/home/somebody/secret/base", "C:\\Users\\somebody\\base"):
        found = about(tmp_path, given={"finetuned_from": folder})
        assert found.base_model is None
        assert found.started_from == folder.replace("\\", "/").rpartition("/")[2]
    assert about(tmp_path, given={"finetuned_from": "org/base"}).base_model == "org/base"


def test_a_relative_folder_is_none_either_when_the_program_has_moved_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "bert").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    model = tiny_bert_classifier()
    model.config._name_or_path = "models/bert"
    trainer = quiet_trainer(tmp_path / "my-model", model)
    monkeypatch.chdir(tmp_path / "models")
    found = subject_of(trainer, Given())
    assert found.base_model is None and found.started_from == "bert"


def test_the_configuration_tells_what_was_fine_tuned(tmp_path: Path) -> None:
    model = tiny_bert_classifier()
    model.config._name_or_path = "org/base"
    assert about(tmp_path, model).base_model == "org/base"


def test_a_dataset_tells_its_name_configuration_and_split(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"x": [1]}, split="validation")
    rows.info.builder_name, rows.info.config_name = "glue", "mrpc"
    (data,) = about(tmp_path, eval_dataset=rows).data
    assert (data.name, data.repository, data.config, data.split) == ("glue", "glue", "mrpc", "validation")
    (data,) = about(tmp_path, eval_dataset={"a": rows}).data
    assert data.repository == "glue"
    rows.info.builder_name = "json"
    assert about(tmp_path, eval_dataset=rows).data == ()


def test_each_dataset_that_is_given_has_its_configuration(tmp_path: Path) -> None:
    found = about(
        tmp_path, given={"dataset_tags": ["glue", "a b"], "dataset": ["GLUE", "mine"], "dataset_args": ["mrpc"]}
    ).data
    assert [(data.name, data.repository, data.arguments) for data in found] == [
        ("GLUE", "glue", "mrpc"),
        ("mine", None, None),
    ]


def test_tags_are_those_given_and_the_models_own_each_once() -> None:
    model = VectorClassifier()
    model.model_tags = ["mine", "trackio"]  # type: ignore[assignment]
    assert tags_of(model, "mine") == ("mine", "trackio", "generated_from_trainer", "littrainer")


def test_the_licence_is_that_of_the_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def model_info(self: Any, name: str, **keywords: Any) -> Any:
        asked.append(name)
        return SimpleNamespace(tags=["pytorch", "license:mit"])

    monkeypatch.setattr(hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    assert about(tmp_path, given={"finetuned_from": "org/base"}).license == "mit"
    assert about(tmp_path, given={"finetuned_from": "org/base", "license": "other"}).license == "other"
    assert asked == ["org/base"]


def test_a_hub_that_does_not_answer_leaves_the_licence_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def model_info(self: Any, name: str, **keywords: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    assert about(tmp_path, given={"finetuned_from": "org/base"}).license is None
