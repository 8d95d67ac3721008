"""A Trainer creates the repository with the name, privacy and branch of its arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hub.runs import pushing_trainer
from tests.hub.server import GOOD_TOKEN, Hub
from tests.hub.test_pushing import SAVES


@pytest.mark.parametrize("name", ["other", "someone/other"])
def test_hub_model_id_names_the_repository_with_or_without_its_owner(hub: Hub, tmp_path: Path, name: str) -> None:
    trainer = pushing_trainer(tmp_path, hub_model_id=name)
    assert trainer.hub_model_id == "someone/other"
    trainer.train()
    assert hub.repository("other").messages() == SAVES


@pytest.mark.parametrize(("private", "visibility"), [(None, None), (True, "private"), (False, "public")])
def test_privacy_is_requested_only_if_it_is_set(
    hub: Hub, tmp_path: Path, private: bool | None, visibility: str | None
) -> None:
    pushing_trainer(tmp_path, hub_private_repo=private)
    assert hub.repository().requested_visibility == visibility


def test_pushes_create_and_update_the_branch_of_hub_revision(hub: Hub, tmp_path: Path) -> None:
    trainer = pushing_trainer(tmp_path, hub_revision="try/one")
    trainer.train()
    trainer.push_to_hub()
    trainer.push_to_hub(revision="release", commit_message="release")
    assert hub.repository().messages() == []
    assert hub.repository().messages("try/one") == [*SAVES, "End of training"]
    assert "release" in hub.repository().branches


def test_the_logged_in_token_is_the_default(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    pushing_trainer(tmp_path, hub_token=None).train()
    assert hub.repository().messages() == SAVES


@pytest.mark.parametrize("token", [None, "hf_wrong"])
def test_without_a_valid_token_making_the_trainer_is_an_error_that_says_how_to_sign_in(
    hub: Hub, tmp_path: Path, token: str | None
) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    with pytest.raises(HfHubHTTPError) as caught:
        pushing_trainer(tmp_path, hub_token=token)
    assert any("hf auth login" in note for note in getattr(caught.value, "__notes__", []))


def test_without_push_to_hub_no_request_is_sent(hub: Hub, tmp_path: Path) -> None:
    trainer = pushing_trainer(tmp_path, push_to_hub=False)
    trainer.train()
    trainer.save_model()
    assert hub.requests == []
