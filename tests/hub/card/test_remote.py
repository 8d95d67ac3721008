"""A card that was edited on the Hub stays there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from littrainer.hub.card.remote import hub_keeps_its_card
from tests.hub.runs import pushing_trainer
from tests.hub.server import Fault, Hub


def edit_on_the_hub(hub: Hub, content: bytes) -> None:
    repository = hub.repository()
    (commits,) = repository.branches.values()
    commits[-1].files["README.md"] = content


def test_a_card_that_was_generated_is_not_kept_and_one_that_was_edited_is(hub: Hub, tmp_path: Path) -> None:
    trainer = pushing_trainer(tmp_path, hub_strategy="end")
    repository, token = str(trainer.hub_model_id), trainer.args.hub_token
    assert not hub_keeps_its_card(repository, token=token)
    trainer.push_to_hub()
    assert not hub_keeps_its_card(repository, token=token)
    edit_on_the_hub(hub, hub.repository().files()["README.md"] + b"\nIt is small.\n")
    assert hub_keeps_its_card(repository, token=token)


def test_a_repository_or_branch_that_is_not_there_keeps_nothing(hub: Hub, tmp_path: Path) -> None:
    trainer = pushing_trainer(tmp_path, hub_strategy="end")
    assert not hub_keeps_its_card("someone/else", token=trainer.args.hub_token)
    assert not hub_keeps_its_card(str(trainer.hub_model_id), "no-branch", trainer.args.hub_token)


def test_a_generated_card_is_not_pushed_over_one_that_was_edited_on_the_hub(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = pushing_trainer(tmp_path)
    trainer.create_model_card()
    trainer.push_to_hub()
    edited = hub.repository().files()["README.md"] + b"\nIt is small.\n"
    edit_on_the_hub(hub, edited)
    with caplog.at_level(logging.WARNING, logger="littrainer"):
        trainer.train()
        trainer.push_to_hub(tags="two")
    assert hub.repository().files()["README.md"] == edited
    assert "was edited on the Hub" in caplog.text
    (tmp_path / "run" / "README.md").write_text("# Mine\n")
    trainer.push_to_hub()
    assert hub.repository().files()["README.md"] == b"# Mine\n"


def test_a_hub_that_does_not_answer_gets_no_generated_card(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = pushing_trainer(tmp_path, hub_strategy="end")
    hub.faults.append(Fault(r"(HEAD|GET) .*README.md", 403))
    with pytest.raises(LocalEntryNotFoundError):
        hub_keeps_its_card(str(trainer.hub_model_id), token=trainer.args.hub_token)
    with caplog.at_level(logging.WARNING, logger="littrainer"):
        trainer.push_to_hub()
    assert "README.md" not in hub.repository().files() and "model.safetensors" in hub.repository().files()
    assert "did not say whether its card was edited" in caplog.text
    assert str(trainer.args.hub_token) not in caplog.text
