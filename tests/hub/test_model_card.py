"""The model card, and the preservation of edits, here and on the Hub."""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
import transformers
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalEntryNotFoundError

import littrainer
from littrainer import TrainerCallback
from littrainer.callbacks.state import TrainerState
from littrainer.hub.model_card import (
    download_card,
    get_last_results,
    is_unedited,
    list_hyperparameters,
)
from littrainer.hub.repository import CARD_NAME
from tests.hub.runs import pushing_trainer
from tests.hub.server import Fault, Hub
from tests.scenarios.data import token_rows
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_lora_tagger
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

EVALUATING: dict[str, Any] = {
    "logging_strategy": "steps",
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
}


def write_card(folder: Path, model: Any = None, **keywords: Any) -> str:
    """Return the card that a Trainer writes into the folder `my-model`."""
    quiet_trainer(folder / "my-model", model).create_model_card(**keywords)
    return (folder / "my-model" / CARD_NAME).read_text(encoding="utf-8")


def parse_metadata(content: str) -> dict[str, Any]:
    entries: dict[str, Any] = ModelCard(content).data.to_dict()
    return entries


# ---- The content of the card ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the same training by littrainer and transformers."""
    trainers = []
    for library in (littrainer, transformers):
        rows = datasets.Dataset.from_list(token_rows(8, longest=3), split="validation")
        rows.info.builder_name, rows.info.config_name = "glue", "mrpc"
        model = tiny_bert_classifier()
        model.config._name_or_path = "org/base"
        folder = tmp_path_factory.mktemp(library.__name__) / "my-model"
        trainer = library.Trainer(
            model,
            quiet_arguments(folder, library.TrainingArguments, max_steps=4, weight_decay=0.1, **EVALUATING),
            train_dataset=rows,
            eval_dataset=rows,
            compute_metrics=lambda _: {"accuracy": 0.5, "fluency": 2.0},
        )
        trainer.train()
        trainers.append(trainer)
    return trainers


def load_card(trainer: Any, keywords: dict[str, Any]) -> ModelCard:
    path = Path(trainer.args.output_dir, CARD_NAME)
    path.unlink(missing_ok=True)
    trainer.create_model_card(**keywords)
    return ModelCard.load(path)


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"language": ["en", "de"], "license": "mit", "tags": ["mine"], "model_name": "name"},
        {"finetuned_from": "org/other", "tasks": "text-classification", "dataset_tags": "glue", "dataset": "GLUE"},
        {"dataset_tags": ["glue"], "dataset": ["GLUE MRPC"], "dataset_args": ["mrpc"], "tasks": ["fill-mask"]},
    ],
    ids=["nothing given", "entries", "one of each", "lists"],
)
def test_metadata_are_those_of_transformers_but_for_our_tag(trained: list[Any], keywords: dict[str, Any]) -> None:
    ours, theirs = (load_card(trainer, keywords).data.to_dict() for trainer in trained)
    ours["tags"].remove("littrainer")
    assert ours == theirs


def test_the_card_contains_results_hyperparameters_and_versions(trained: list[Any]) -> None:
    text = load_card(trained[0], {"dataset_tags": "glue", "dataset": "GLUE <MRPC>", "finetuned_from": "org/base"}).text
    for part in (
        "# my-model",
        "a fine-tuned version of [org/base](https://huggingface.co/org/base), trained on the GLUE &lt;MRPC&gt; data",
        "- Accuracy: 0.5000",
        "- weight_decay: 0.1",
        "- training_steps: 4",
        "By Lightning: single device, one cpu device, precision 32-true.",
        "| Training Loss | Epoch | Step | Validation Loss | Accuracy | Fluency |",
        f"- Lightning {importlib.metadata.version('lightning')}",
    ):
        assert part in text, part
    assert sum(line.startswith("| ") for line in text.splitlines()) == 3


def test_results_are_from_the_last_evaluation_and_each_evaluation_set_has_its_columns(tmp_path: Path) -> None:
    after = {"eval_loss": 1.25, "step": 4, "epoch": 2.0}
    trainer = quiet_trainer(tmp_path)
    trainer.state = TrainerState(
        log_history=[
            {"eval_hard_loss": 4.0, "eval_hard_runtime": 0.1, "step": 1, "epoch": 0.5},
            {"loss": 1.0, "step": 2, "epoch": 1.0},
            {"eval_loss": 1.5, "eval_matthews_correlation": 0.5, "step": 4, "epoch": 2.0},
            {"train_runtime": 1.0, "train_samples_per_second": 8.0, "step": 4},
            after,
        ]
    )
    assert get_last_results(trainer.state.log_history)["loss", "evaluation"] == 1.25
    trainer.create_model_card()
    table = [line for line in (tmp_path / CARD_NAME).read_text().splitlines() if line.startswith("| ")]
    assert table == [
        "| Training Loss | Epoch | Step | Loss (hard) | Validation Loss | Matthews Correlation |",
        "| No log | 0.5000 | 1 | 4.0 |  |  |",
        "| 1.0 | 2.0 | 4 |  | 1.5000 | 0.5000 |",
    ]


def test_hyperparameters_are_those_of_a_card_of_transformers_and_weight_decay(tmp_path: Path) -> None:
    always = ["learning_rate", "train_batch_size", "eval_batch_size", "seed", "optimizer", "lr_scheduler_type"]
    trainer = quiet_trainer(tmp_path, hub_token="hf_abc", run_name="private")
    assert list(list_hyperparameters(trainer.args, trainer.state)) == [*always, "num_epochs"]
    changes: dict[str, Any] = {"weight_decay": 0.1, "warmup_steps": 3, "max_steps": 7, "gradient_accumulation_steps": 2}
    trainer = quiet_trainer(tmp_path, optim="adamw_torch", adam_beta2=0.95, label_smoothing_factor=0.2, **changes)
    values = list_hyperparameters(trainer.args, trainer.state)
    assert {name: value for name, value in values.items() if name not in always} == {
        "gradient_accumulation_steps": "2",
        "total_train_batch_size": "8",
        "lr_scheduler_warmup_steps": "3",
        "training_steps": "7",
        "label_smoothing_factor": "0.2",
        "weight_decay": "0.1",
    }
    assert values["optimizer"] == "adamw_torch with betas=(0.9, 0.95), epsilon=1e-08"


def test_a_folder_is_no_base_model_and_is_named_by_its_end_alone(tmp_path: Path) -> None:
    for folder in (str(tmp_path), "/home/somebody/secret/base", "C:\\Users\\somebody\\base"):
        content = write_card(tmp_path, finetuned_from=folder)
        assert "base_model" not in parse_metadata(content) and "secret" not in content and "Users" not in content
        assert f"a fine-tuned version of `{folder.replace(chr(92), '/').rpartition('/')[2]}`" in content


def test_the_licence_is_copied_from_the_base_model_if_the_hub_is_reachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model_info(self: Any, name: str, **keywords: Any) -> Any:
        if name == "org/base":
            return SimpleNamespace(tags=["pytorch", "license:mit"])
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert parse_metadata(write_card(tmp_path, finetuned_from="org/base"))["license"] == "mit"
    assert parse_metadata(write_card(tmp_path, finetuned_from="org/base", license="other"))["license"] == "other"
    assert "license" not in parse_metadata(write_card(tmp_path, finetuned_from="org/elsewhere"))


def test_badges_and_tags_of_trackers_are_in_the_card(tmp_path: Path) -> None:
    class Tracker(TrainerCallback):
        def card_badge(self) -> str:
            return "[run](https://tracker/run)"

    class FailingTracker(TrainerCallback):
        def card_badge(self) -> str:
            raise RuntimeError("no connection")

    model = VectorClassifier()
    model.model_tags = ["trackio", "mine"]  # type: ignore[assignment]
    quiet_trainer(tmp_path, model, trainer_kwargs={"callbacks": [FailingTracker(), Tracker()]}).create_model_card(
        tags="mine"
    )
    card = ModelCard.load(tmp_path / CARD_NAME)
    assert card.data.tags == ["mine", "trackio", "generated_from_trainer", "littrainer"]
    assert card.text.index("# ") < card.text.index("[run](https://tracker/run)") < card.text.index("from scratch")


def test_names_cannot_inject_html_links_or_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "hf_" + "Zy9" * 10
    monkeypatch.setenv("HF_TOKEN", "a-token-of-another-form")
    trainer = quiet_trainer(tmp_path, hub_token="hubtoken-without-prefix", run_name=other)
    trainer.create_model_card(
        model_name=f"<b>x</b>\n# {other} hubtoken-without-prefix",
        tags=["a-token-of-another-form", other],
        dataset=["https://me:password@host/data", "![free](https://elsewhere)"],
    )
    content = (tmp_path / CARD_NAME).read_text(encoding="utf-8")
    hidden = (
        other,
        "hubtoken-without-prefix",
        "a-token-of-another-form",
        "me:password",
        "](https://elsewhere)",
        "<b>x",
    )
    assert [text for text in hidden if text in content.partition("---\n\n")[2]] == []
    assert [secret for secret in hidden[:4] if secret in content] == []
    assert is_unedited(content)


# ---- An edited card ------------------------------------------------------------------------------------------------


def test_a_card_that_was_not_edited_is_written_again(tmp_path: Path) -> None:
    first = write_card(tmp_path, tags="one", license="mit")
    path = tmp_path / "my-model" / CARD_NAME
    # Editors change the ends of lines.
    path.write_bytes(first.replace("\n", "\r\n").encode() + b"\n")
    second = write_card(tmp_path, tags="two")
    assert "- one" in first and "- one" not in second and "license" not in second


@pytest.mark.parametrize(
    "edit",
    [
        ("More information needed", "It is small."),
        ("license: mit", "license: gpl-3.0"),
        ("- one\n", ""),
        ("---\n", "---\nextra_gated_prompt: You agree\n"),
        ("<!-- littrainer wrote this card", "<!-- I wrote this card"),
        *("# Mine\n", "---\nlicense: mit\n---\n", "---\ntags: [\n---\n", "---\n- a\n---\n"),
    ],
)
def test_an_edited_card_is_preserved_byte_for_byte_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, edit: tuple[str, str] | str
) -> None:
    path = tmp_path / "my-model" / CARD_NAME
    card = write_card(tmp_path, tags="one", license="mit")
    edited = (edit if isinstance(edit, str) else card.replace(*edit, 1)).encode()
    path.write_bytes(edited)
    with caplog.at_level(logging.WARNING, logger="littrainer"):
        write_card(tmp_path, tags="two", license="other")
    assert path.read_bytes() == edited
    assert "is kept as it is, since it has been edited" in caplog.text


def test_an_adapters_card_has_what_peft_adds_and_is_written_again_though_peft_rewrites_it(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    trainer = quiet_trainer(tmp_path, tiny_lora_tagger())
    path = tmp_path / CARD_NAME
    for tag in ("mine", "yours"):
        # PEFT writes a card, or into the present card.
        trainer.save_model()
        assert "- PEFT " in path.read_text(encoding="utf-8")
        trainer.create_model_card(tags=tag)
        content = path.read_text(encoding="utf-8")
        entries = parse_metadata(content)
        assert entries["library_name"] == "peft" and {tag, "lora", "littrainer"} <= set(entries["tags"])
        assert content.count("- PEFT ") == 1 and "### Training hyperparameters" in content and is_unedited(content)
    path.write_text(content.replace("More information needed", "It is small.", 1), encoding="utf-8")
    trainer.save_model()
    trainer.create_model_card()
    assert "It is small." in path.read_text(encoding="utf-8")


def edit_on_the_hub(hub: Hub, content: bytes) -> None:
    (commits,) = hub.repository().branches.values()
    commits[-1].files[CARD_NAME] = content


def test_a_generated_card_does_not_replace_a_card_that_was_edited_on_the_hub(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = pushing_trainer(tmp_path)
    assert download_card("someone/else", token=trainer.args.hub_token) == ""
    assert download_card(str(trainer.hub_model_id), "no-branch", trainer.args.hub_token) == ""
    trainer.push_to_hub()
    pushed = hub.repository().files()[CARD_NAME]
    assert is_unedited(pushed.decode())
    trainer.push_to_hub(tags="again")
    assert b"- again" in hub.repository().files()[CARD_NAME]
    edited = pushed + b"\nIt is small.\n"
    edit_on_the_hub(hub, edited)
    with caplog.at_level(logging.WARNING, logger="littrainer"):
        trainer.train()
        trainer.push_to_hub(tags="two")
    assert hub.repository().files()[CARD_NAME] == edited
    assert "was edited on the Hub" in caplog.text
    # A card write_card by hand is pushed.
    (tmp_path / "run" / CARD_NAME).write_text("# Mine\n")
    trainer.push_to_hub()
    assert hub.repository().files()[CARD_NAME] == b"# Mine\n"


def test_no_generated_card_is_pushed_to_an_unreachable_hub(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = pushing_trainer(tmp_path, hub_strategy="end")
    hub.faults.append(Fault(r"(HEAD|GET) .*README.md", 403))
    with pytest.raises(LocalEntryNotFoundError):
        download_card(str(trainer.hub_model_id), token=trainer.args.hub_token)
    with caplog.at_level(logging.WARNING, logger="littrainer"):
        trainer.push_to_hub()
    assert CARD_NAME not in hub.repository().files() and "model.safetensors" in hub.repository().files()
    assert "the Hub did not say it" in caplog.text and str(trainer.args.hub_token) not in caplog.text
