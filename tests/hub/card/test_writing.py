from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from littrainer import TrainerCallback
from littrainer.hub.card.block import CARD_NAME, read_card
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_lora_tagger
from tests.scenarios.trainers import quiet_trainer

TOKEN = "hf_" + "aB3" * 10


def written(folder: Path, **keywords: Any) -> str:
    trainer = quiet_trainer(folder / "my-model")
    trainer.create_model_card(**keywords)
    return (folder / "my-model" / CARD_NAME).read_text(encoding="utf-8")


def test_the_hubs_own_class_reads_the_card_of_a_training(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path / "my-model",
        tiny_bert_classifier(),
        given={"compute_metrics": lambda _: {"accuracy": 0.5}, **_tokens()},
        max_steps=4,
        logging_strategy="steps",
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        weight_decay=0.1,
    )
    trainer.train()
    trainer.create_model_card(
        language="no",
        license="mit",
        tags="mine",
        finetuned_from="org/base",
        dataset_tags="glue",
        dataset="GLUE MRPC",
        dataset_args="mrpc",
    )
    card = ModelCard.load(tmp_path / "my-model" / CARD_NAME)
    data = card.data
    assert (data.language, data.license, data.base_model) == (["no"], "mit", "org/base")
    assert data.tags == ["mine", "generated_from_trainer", "littrainer"]
    assert [(result.metric_type, result.metric_value) for result in data.eval_results] == [("accuracy", 0.5)]
    assert data.model_name == "my-model" and data.library_name == "transformers"
    for part in (
        "# my-model",
        "[org/base](https://huggingface.co/org/base)",
        "- Accuracy: 0.5000",
        "- weight_decay: 0.1",
        "- training_steps: 4",
        "SingleDeviceStrategy",
        "| Training Loss | Epoch | Step | Validation Loss | Accuracy |",
        f"- Lightning {importlib.metadata.version('lightning')}",
    ):
        assert part in card.text, part
    assert sum(line.startswith("| ") for line in card.text.splitlines()) == 3


def _tokens() -> dict[str, Any]:
    from tests.scenarios.data import Rows, token_rows

    return {"train_dataset": Rows(token_rows(8, longest=3)), "eval_dataset": Rows(token_rows(4, longest=3))}


def test_a_generated_card_is_written_anew(tmp_path: Path) -> None:
    first = written(tmp_path, tags="one", license="mit")
    second = written(tmp_path, tags="two")
    assert "- one" in first and "- one" not in second and "license" not in second


def test_a_card_that_was_edited_is_kept_byte_for_byte_and_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path)
    path = tmp_path / "my-model" / CARD_NAME
    edited = path.read_bytes().replace(b"More information needed", b"It is small.\r\n", 1)
    path.write_bytes(edited)
    with caplog.at_level(logging.WARNING, logger="littrainer"):
        written(tmp_path, tags="two", license="mit")
    assert path.read_bytes() == edited
    assert "is kept as it is" in caplog.text


def test_metadata_that_were_edited_go_into_the_new_card(tmp_path: Path) -> None:
    path = tmp_path / "my-model" / CARD_NAME
    before = written(tmp_path, license="mit")
    path.write_text(before.replace("license: mit", "license: apache-2.0\nwidget:\n- text: x"), encoding="utf-8")
    for _ in range(2):
        metadata = read_card(written(tmp_path, tags="two")).metadata
        assert metadata is not None
        assert metadata["license"] == "apache-2.0" and metadata["widget"] == [{"text": "x"}]
        assert "two" in metadata["tags"]


def test_a_block_that_the_hub_made_with_a_licence_alone_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "my-model" / CARD_NAME
    path.parent.mkdir()
    path.write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    content = written(tmp_path)
    assert "license: mit" in content and "# my-model" in content


def test_no_token_stands_in_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "hf_" + "Zy9" * 10
    monkeypatch.setenv("HF_TOKEN", "a-token-of-another-form")
    trainer = quiet_trainer(tmp_path, hub_token="hubtoken-without-prefix", run_name=other)
    trainer.create_model_card(
        model_name=f"x {other} hubtoken-without-prefix",
        tags=["a-token-of-another-form", other],
        dataset="https://me:password@host/data",
    )
    content = (tmp_path / CARD_NAME).read_text(encoding="utf-8")
    for secret in (other, "hubtoken-without-prefix", "a-token-of-another-form", "me:password"):
        assert secret not in content
    assert not read_card(content).has_text_of_a_person
    ModelCard.load(tmp_path / CARD_NAME)


def test_badges_and_tags_of_trackers_are_in_the_card(tmp_path: Path) -> None:
    class Tracker(TrainerCallback):
        def card_badge(self) -> str:
            return "[run](https://tracker/run)"

    class Broken(TrainerCallback):
        def card_badge(self) -> str:
            raise RuntimeError("no connection")

    model = VectorClassifier()
    model.model_tags = ["trackio"]  # type: ignore[assignment]
    trainer = quiet_trainer(tmp_path, model, given={"callbacks": [Broken(), Tracker()]})
    trainer.create_model_card()
    card = ModelCard.load(tmp_path / CARD_NAME)
    assert "[run](https://tracker/run)" in card.text and "trackio" in card.data.tags


def test_an_adapters_card_has_what_peft_adds_and_what_the_trainer_knows(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    trainer = quiet_trainer(tmp_path, tiny_lora_tagger())
    for _ in range(2):
        trainer.save_model()
        trainer.create_model_card(tags="mine")
        content = (tmp_path / CARD_NAME).read_text(encoding="utf-8")
        card = ModelCard(content)
        metadata = card.data.to_dict()
        assert metadata["library_name"] == "peft" and {"mine", "lora"} <= set(metadata["tags"])
        assert card.text.count("- PEFT ") == 1 and "### Training hyperparameters" in card.text
        assert not read_card(content).has_text_of_a_person


def test_only_the_first_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet_trainer(tmp_path)
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    trainer.create_model_card()
    assert not (tmp_path / CARD_NAME).exists()
