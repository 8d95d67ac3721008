"""What was edited of a card on the Hub stays there: a text as a whole, and each entry of the metadata."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from littrainer.hub.card.block import CARD_NAME, SEAL_PLACE, Card, read_card, written_card
from littrainer.hub.card.remote import card_on_the_hub, settle_card
from littrainer.hub.card.subject import Given
from tests.hub.runs import pushing_trainer
from tests.hub.server import Fault, Hub


def edit_on_the_hub(hub: Hub, content: bytes) -> None:
    repository = hub.repository()
    (commits,) = repository.branches.values()
    commits[-1].files["README.md"] = content


def test_a_card_that_was_generated_is_not_kept_and_one_that_was_edited_is(hub: Hub, tmp_path: Path) -> None:
    trainer = pushing_trainer(tmp_path, hub_strategy="end")
    repository, token = str(trainer.hub_model_id), trainer.args.hub_token
    assert card_on_the_hub(repository, token=token) is None
    trainer.push_to_hub()
    generated = card_on_the_hub(repository, token=token)
    assert generated is not None and not generated.has_text_of_a_person and not generated.has_block_of_a_person
    edit_on_the_hub(hub, hub.repository().files()["README.md"] + b"\nIt is small.\n")
    edited = card_on_the_hub(repository, token=token)
    assert edited is not None and edited.has_text_of_a_person


def test_a_repository_or_branch_that_is_not_there_keeps_nothing(hub: Hub, tmp_path: Path) -> None:
    trainer = pushing_trainer(tmp_path, hub_strategy="end")
    assert card_on_the_hub("someone/else", token=trainer.args.hub_token) is None
    assert card_on_the_hub(str(trainer.hub_model_id), "no-branch", trainer.args.hub_token) is None


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
        card_on_the_hub(str(trainer.hub_model_id), token=trainer.args.hub_token)
    with caplog.at_level(logging.WARNING, logger="littrainer"):
        trainer.push_to_hub()
    assert "README.md" not in hub.repository().files() and "model.safetensors" in hub.repository().files()
    assert "did not say whether its card was edited" in caplog.text
    assert str(trainer.args.hub_token) not in caplog.text


def test_a_licence_that_the_hub_made_with_the_repository_and_a_gate_that_was_set_there_stay(
    hub: Hub, tmp_path: Path
) -> None:
    trainer = pushing_trainer(tmp_path, max_steps=2)
    edit_on_the_hub(hub, b"---\nlicense: gpl-3.0\n---\n")
    trainer.push_to_hub()
    pushed = hub.repository().files()["README.md"]
    assert b"license: gpl-3.0" in pushed and b"# run" in pushed
    edit_on_the_hub(hub, pushed.replace(b"---\n", b"---\nextra_gated_prompt: You agree\n", 1))
    trainer.train()
    trainer.push_to_hub(blocking=False).result(60)
    for commit in hub.repository().branches["main"][-2:]:
        metadata = read_card(commit.files["README.md"].decode()).metadata or {}
        assert (metadata["license"], metadata["extra_gated_prompt"]) == ("gpl-3.0", "You agree")
        assert "littrainer" in metadata["tags"]


TEXT = f"\n# Name\n\n{SEAL_PLACE}\n"


def settled(folder: Path, monkeypatch: pytest.MonkeyPatch, here: str, there: str, given: Given | None = None) -> Card:
    """The card that is pushed from a folder to a Hub that has another one."""
    monkeypatch.setattr("littrainer.hub.card.remote.card_on_the_hub", lambda *where: read_card(there))
    (folder / CARD_NAME).write_text(here, encoding="utf-8")
    assert settle_card(folder, "me/run", None, None, given) == []
    return read_card((folder / CARD_NAME).read_text(encoding="utf-8"))


def test_an_entry_of_the_hub_loses_against_the_call_and_the_results_and_stays_a_persons_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = written_card({"license": "mit", "tags": ["a"], "metrics": ["f1"]}, TEXT)
    there = written_card({"tags": ["a"]}, TEXT).replace(
        "tags:\n- a\n", "license: gpl-3.0\nmetrics:\n- wer\ntags:\n- b\n"
    )
    card = settled(tmp_path, monkeypatch, here, there)
    assert card.metadata == {"license": "gpl-3.0", "tags": ["a", "b"], "metrics": ["f1"]}
    assert set(card.entries_of_a_person()) == {"license", "tags"} and not card.has_block_of_a_person
    card = settled(tmp_path, monkeypatch, here, there, Given(license="mit"))
    assert (card.metadata or {})["license"] == "mit"


def test_an_entry_that_was_taken_out_on_the_hub_stays_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = written_card({"license": "mit", "tags": ["a"]}, TEXT)
    assert settled(tmp_path, monkeypatch, here, here.replace("license: mit\n", "")).metadata == {"tags": ["a"]}


def test_of_entries_that_were_changed_on_both_sides_the_later_change_stays_and_a_loss_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generated = {"license": "mit"}
    pushed = written_card({"license": "gpl-3.0"}, TEXT, generated)
    changed_here = pushed.replace("gpl-3.0", "apache-2.0")
    with caplog.at_level(logging.WARNING, logger="littrainer"):
        assert settled(tmp_path, monkeypatch, changed_here, pushed).metadata == {"license": "apache-2.0"}
        assert caplog.text == ""
        changed_there = pushed.replace("gpl-3.0", "bsd")
        assert settled(tmp_path, monkeypatch, changed_here, changed_there).metadata == {"license": "bsd"}
    assert "edited on the Hub" in caplog.text and "license" in caplog.text


def test_a_card_of_a_person_is_pushed_as_it_is_and_what_the_hub_loses_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = "---\nlicense: mit\n---\n# Mine\n"
    there = "---\nlicense: gpl-3.0\nextra_gated_prompt: You agree\n---\n"
    with caplog.at_level(logging.WARNING, logger="littrainer"):
        settled(tmp_path, monkeypatch, here, there)
    assert (tmp_path / CARD_NAME).read_text(encoding="utf-8") == here
    assert "extra_gated_prompt" in caplog.text and "license" not in caplog.text


def test_a_card_is_not_pushed_with_metadata_of_the_hub_that_it_would_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = read_card("---\neval_results: 5\n---\n")
    monkeypatch.setattr("littrainer.hub.card.remote.card_on_the_hub", lambda *where: there)
    (tmp_path / CARD_NAME).write_text(written_card({"license": "mit"}, TEXT), encoding="utf-8")
    assert settle_card(tmp_path, "me/run", None, None) == [CARD_NAME]
    assert "is not pushed" in caplog.text
