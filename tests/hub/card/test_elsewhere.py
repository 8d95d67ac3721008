"""Cards as transformers, PEFT and huggingface_hub write them, and the same with a word of a person."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, ModelCardData

from littrainer.hub.card.block import read_card
from tests.scenarios.models import tiny_lora_tagger


def is_kept(content: str) -> bool:
    """Whether it has words of a person, so that no generated card takes its place."""
    return read_card(content).has_text_of_a_person


HYPERPARAMETERS = {
    "learning_rate": 5e-05,
    "train_batch_size": 8,
    "seed": 42,
    "optimizer": "Use adafactor and the args are:\nNo additional optimizer arguments",
    "lr_scheduler_type": "linear",
    "num_epochs": 3.0,
}
BADGE = '[<img src="https://badge.svg" alt="Visualize in Weights & Biases" width="200" height="32"/>](https://run)'


def of_transformers(**given: Any) -> str:
    summary = pytest.importorskip("transformers.modelcard").TrainingSummary
    lines = [{"Training Loss": "No log", "Epoch": 1.0, "Step": 5, "Validation Loss": 0.51, "Accuracy": 0.75}]
    known: dict[str, Any] = {
        "model_name": "my-model",
        "finetuned_from": "org/base-v1.5",
        "tags": ["generated_from_trainer"],
        "dataset": ["glue", "imdb"],
        "dataset_tags": ["glue", "imdb"],
        "eval_results": {"Loss": 0.51, "Accuracy": 0.75, "Per class": {"a": 1}},
        "eval_lines": lines,
        "hyperparameters": HYPERPARAMETERS,
    }
    card: str = summary(**{**known, **given}).to_model_card()
    return card


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"finetuned_from": None, "dataset": None, "dataset_tags": None, "eval_results": None, "eval_lines": None},
        {
            "dataset": "glue",
            "eval_results": {"Loss": float("nan")},
            "hyperparameters": {"optimizer": "Use adamw_torch"},
        },
    ],
    ids=["all", "nothing known", "one dataset"],
)
def test_a_card_of_transformers_is_nobodys(given: dict[str, Any]) -> None:
    card = of_transformers(**given)
    assert not is_kept(card)
    assert not is_kept(card.replace("this comment. -->\n", f"this comment. -->\n{BADGE}\n"))
    assert not is_kept(card.replace("### Framework versions\n\n", "### Framework versions\n\n- PEFT 0.17.0\n"))


@pytest.mark.parametrize(
    "edit",
    [
        lambda card: card.replace("More information needed", "It is small.", 1),
        lambda card: card.replace("## Model description", "Never for medical advice.\n\n## Model description"),
        lambda card: card.replace("imdb datasets.", "imdb datasets. It is mine."),
        lambda card: card.replace("- Loss: 0.51\n", "- Loss: 0.51\n- Tested by: Jane\n"),
        lambda card: card.replace("- seed: 42\n", "- seed: 42\n- note: two weeks\n"),
        lambda card: card.replace("# my-model", "# My model"),
        lambda card: card.replace("then remove this comment.", "then remove this."),
        lambda card: card + "\n## Licence\n",
    ],
)
def test_a_card_of_transformers_is_a_persons_with_a_line_that_it_does_not_generate(edit: Callable[[str], str]) -> None:
    card = of_transformers()
    assert edit(card) != card
    assert is_kept(edit(card))


def test_of_a_card_of_transformers_only_what_is_found_anew_is_dropped() -> None:
    card = of_transformers().replace("---\n", "---\nlicense: gpl-3.0\nextra_gated_prompt: You agree\n", 1)
    assert read_card(card).entries_of_a_person() == {
        "license": "gpl-3.0",
        "extra_gated_prompt": "You agree",
        "tags": ["generated_from_trainer"],
    }


def template(**filled_in: str) -> str:
    pytest.importorskip("jinja2")
    return str(ModelCard.from_template(ModelCardData(license="mit") if filled_in else ModelCardData(), **filled_in))


def test_the_empty_template_of_the_hub_is_nobodys_and_one_with_a_word_is_a_persons() -> None:
    assert not is_kept(template())
    assert is_kept(template(model_description="It is small."))
    assert is_kept(template(bias_risks_limitations="Never use it on dogs."))
    assert is_kept(template() + "\nIt is mine.\n")


def test_a_card_that_peft_writes_is_nobodys(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    for _ in range(2):
        tiny_lora_tagger().save_pretrained(tmp_path)
        card = (tmp_path / "README.md").read_text(encoding="utf-8")
        assert "- PEFT " in card and not is_kept(card)
    assert is_kept(card + "\nIt is mine.\n")
