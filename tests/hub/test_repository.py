"""The repository is made when a Trainer is, with the name, privacy and branch that the arguments ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from littrainer import TrainingArguments
from tests.hub.runs import pushing_trainer
from tests.hub.server import GOOD_TOKEN, MAIN, Fault, Hub
from tests.hub.test_pushing import SAVES


def test_the_repository_is_called_like_the_output_folder_and_belongs_to_who_signs_in(hub: Hub, tmp_path: Path) -> None:
    trainer = pushing_trainer(tmp_path)
    assert trainer.hub_model_id == "someone/run"
    assert list(hub.repositories) == ["someone/run"]


@pytest.mark.parametrize("name", ["other", "someone/other"])
def test_hub_model_id_names_the_repository_with_or_without_its_owner(hub: Hub, tmp_path: Path, name: str) -> None:
    trainer = pushing_trainer(tmp_path, hub_model_id=name)
    assert trainer.hub_model_id == "someone/other"
    trainer.train()
    assert hub.repository("other").messages() == SAVES


@pytest.mark.parametrize(("private", "asked"), [(None, None), (True, "private"), (False, "public")])
def test_privacy_is_asked_for_only_where_it_is_set(
    hub: Hub, tmp_path: Path, private: bool | None, asked: str | None
) -> None:
    pushing_trainer(tmp_path, hub_private_repo=private)
    assert hub.repository().asked_visibility == asked


def test_a_repository_that_is_there_is_pushed_to(hub: Hub, tmp_path: Path) -> None:
    pushing_trainer(tmp_path / "first").train()
    pushing_trainer(tmp_path / "second", learning_rate=0.5).train()
    assert hub.repository().messages() == SAVES * 2


def test_pushes_go_to_the_branch_of_hub_revision_which_is_made(hub: Hub, tmp_path: Path) -> None:
    trainer = pushing_trainer(tmp_path, hub_revision="try/one")
    trainer.train()
    trainer.push_to_hub()
    assert hub.repository().messages() == []
    assert hub.repository().messages("try/one") == [*SAVES, "End of training"]


def test_a_branch_and_a_repository_that_are_named_after_the_trainer_was_made_are_made_with_the_next_push(
    hub: Hub, tmp_path: Path
) -> None:
    trainer = pushing_trainer(tmp_path)
    trainer.args.hub_revision = "dev"
    trainer.train()
    assert hub.repository().messages(MAIN) == []
    assert hub.repository().messages("dev") == SAVES
    trainer.args.hub_model_id, trainer.args.hub_revision = "other", None
    trainer.push_to_hub()
    assert trainer.hub_model_id == "someone/other"
    assert hub.repository("other").messages() == ["End of training"]


def test_a_push_by_hand_goes_to_a_branch_of_its_own_and_makes_it(hub: Hub, tmp_path: Path) -> None:
    trainer = pushing_trainer(tmp_path, save_strategy="no")
    trainer.push_to_hub(revision="release")
    assert hub.repository().messages("release") == ["End of training"]
    assert hub.repository().messages(MAIN) == []


def test_set_push_to_hub_is_enough(hub: Hub, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path / "run"), report_to="none", use_cpu=True, disable_tqdm=True)
    args.set_push_to_hub("chosen", strategy="end", token=GOOD_TOKEN, private_repo=True)
    from littrainer import Trainer
    from tests.scenarios.models import VectorClassifier

    trainer = Trainer(VectorClassifier(), args)
    trainer.save_model()
    assert hub.repository("chosen").private
    assert hub.repository("chosen").messages() == ["Model save"]


def test_the_token_that_is_logged_in_is_taken_where_none_is_given(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_namespace_that_the_token_may_not_write_to_is_an_error_before_training(hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    with pytest.raises(HfHubHTTPError) as caught:
        pushing_trainer(tmp_path, hub_model_id="others/run")
    assert any("hub_model_id" in note for note in getattr(caught.value, "__notes__", []))


def test_a_hub_that_fails_for_a_moment_when_the_trainer_is_made_is_asked_again(hub: Hub, tmp_path: Path) -> None:
    hub.faults.append(Fault("POST /api/repos/create", 500, times=2))
    assert pushing_trainer(tmp_path).hub_model_id == "someone/run"


def test_without_push_to_hub_nothing_is_asked_of_any_hub(hub: Hub, tmp_path: Path) -> None:
    trainer = pushing_trainer(tmp_path, push_to_hub=False)
    trainer.train()
    trainer.save_model()
    assert hub.requests == []
