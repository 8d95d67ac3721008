"""The access token is in the headers of requests only, and in no file, log line, card or commit."""

from __future__ import annotations

import json
import logging
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest

from littrainer import Trainer
from littrainer.hub.repository import PushError, contains_token, redact_tokens
from tests.hub.runs import files_below, pushing_trainer
from tests.hub.server import GOOD_TOKEN, USER, Fault, Hub
from tests.scenarios.other_processes import MAX_WAIT_SECONDS


def has_token(content: bytes | str) -> bool:
    return GOOD_TOKEN in content if isinstance(content, str) else GOOD_TOKEN.encode() in content


def assert_token_is_nowhere(hub: Hub, folder: Path, logged: str) -> None:
    assert not has_token(logged)
    assert [name for name, content in files_below(folder).items() if has_token(content)] == []
    for repository in hub.repositories.values():
        for commits in repository.branches.values():
            for commit in commits:
                assert not has_token(commit.message)
                assert [name for name, content in commit.files.items() if has_token(content)] == []
    for request in hub.requests:
        assert not has_token(request.path) and not has_token(request.body)
        carriers = {name for name, value in request.headers.items() if has_token(value)}
        assert carriers <= {"authorization", "Authorization"}


# Files of each training below, which are searched for tokens.
WRITTEN = {
    *("README.md", "training_args.bin", "trainer_state.json", "train_results.json", "checkpoint-6/optimizer.pt"),
    *(
        "checkpoint-6/trainer_state.json",
        "checkpoint-6/training_args.bin",
        "checkpoint-6/littrainer_manifest.json",
        "littrainer_run.json",
    ),
    *("checkpoint-6/scheduler.pt", "checkpoint-6/rng_state.pth", "checkpoint-6/littrainer_resume.pt", "lightning.yaml"),
}


def test_after_a_training_that_pushes(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    caplog.set_level(logging.DEBUG)
    # Trackers write into the output folder, from which they are pushed.
    trackers = {"report_to": ["tensorboard"], "logging_dir": str(tmp_path / "run" / "logs")}
    trainer = pushing_trainer(
        tmp_path,
        hub_strategy="all_checkpoints",
        logging_strategy="steps",
        logging_steps=1,
        log_level="debug",
        **trackers,
    )
    output = trainer.train()
    trainer.save_metrics("train", output.metrics)
    trainer.save_state()
    # Scripts may write such records.
    (tmp_path / "run" / "arguments.json").write_text(trainer.args.to_json_string() + str(trainer.args))
    (tmp_path / "run" / "lightning.yaml").write_text(str(trainer.lightning_trainer.__dict__) + repr(trainer.args))
    trainer.save_model()
    (tmp_path / "run" / "notes.txt").write_text("one more thing to push")
    trainer.push_to_hub(token=GOOD_TOKEN)
    assert hub.repository().messages()[-1] == "End of training"
    files = files_below(tmp_path / "run").keys()
    assert files >= WRITTEN and any(name.startswith("logs/events.out.tfevents") for name in files)
    assert any("tfevents" in name for name in hub.repository().files())
    out, err = capfd.readouterr()
    assert "POST" in caplog.text and "someone/run" in caplog.text
    assert_token_is_nowhere(hub, tmp_path, caplog.text + out + err)


@pytest.mark.parametrize("token", [GOOD_TOKEN, None], ids=["by hub_token", "logged in"])
def test_where_pushes_fail(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    if token is None:
        monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    caplog.set_level(logging.DEBUG)
    # The server repeats the token.
    hub.faults.append(Fault("POST .*/commit/", 500, body={"error": f"Bearer {GOOD_TOKEN} is not welcome"}))
    trainer = pushing_trainer(tmp_path, hub_token=token, max_steps=2)
    failure = trainer.train().metrics["push_to_hub_error"]
    assert "is not welcome" in failure and not has_token(failure)
    with pytest.raises(PushError) as caught:
        trainer.push_to_hub()
    assert not has_token("".join(traceback.format_exception(caught.value)))
    assert_token_is_nowhere(hub, tmp_path, caplog.text)


def test_white_space_around_a_token_is_no_part_of_it(hub: Hub, tmp_path: Path) -> None:
    trainer = pushing_trainer(tmp_path, hub_token=f"{GOOD_TOKEN}\n", save_strategy="no")
    trainer.push_to_hub()
    assert hub.repository().messages() == ["End of training"]


class WritesItsArguments(Trainer):
    """A Trainer that writes its arguments with each model, as scripts do."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        path = Path(output_dir or str(self.args.output_dir)) / "arguments.json"
        path.write_text(json.dumps({"hub_token": self.args.hub_token}))


@pytest.mark.parametrize("blocking", [True, False])
def test_a_file_with_a_token_is_not_pushed_with_a_warning(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, blocking: bool
) -> None:
    other, run = "hf_" + "other" * 6, tmp_path / "run"
    hub.tokens[other] = USER
    (run / "a[b]").mkdir(parents=True)
    for name, content in ((".env", GOOD_TOKEN), ("a[b]/c*.txt", GOOD_TOKEN), ("a[b]/cd.txt", "none")):
        (run / name).write_text(f"token: {content}")
    trainer = pushing_trainer(tmp_path, hub_strategy="all_checkpoints", max_steps=2, kind=WritesItsArguments)
    trainer.train()
    (run / "mine").write_text(other)
    pushed: Any = trainer.push_to_hub(token=other, blocking=blocking)
    if not blocking:
        pushed.result(timeout=MAX_WAIT_SECONDS)
    for files in (commit.files for commit in hub.repository().branches["main"][1:]):
        assert [name for name, content in files.items() if has_token(content)] == []
        assert "a[b]/cd.txt" in files
    assert {"model.safetensors", "checkpoint-2/trainer_state.json"} <= files.keys()
    # A push with another token sends neither token.
    assert (run / "checkpoint-2" / "arguments.json").exists() and other.encode() not in b"".join(files.values())
    for name in (".env", "arguments.json"):
        assert f"{name} is not pushed to the Hub: an access token is in it" in caplog.text
    assert not has_token(caplog.text)


def test_a_pickled_trainer_has_no_pushes(hub: Hub, tmp_path: Path) -> None:
    trainer = pushing_trainer(tmp_path, max_steps=2)
    trainer.train()
    again = pickle.loads(pickle.dumps(trainer.push_in_progress))
    assert again.is_done() and not has_token(pickle.dumps(trainer.push_in_progress))


def test_what_looks_like_a_token_is_in_no_text_of_an_error_whosever_it_is() -> None:
    assert redact_tokens(f"[{GOOD_TOKEN}] and hf_short") == "[<HUB_TOKEN>] and hf_short"
    assert contains_token(GOOD_TOKEN) and not contains_token("hf_short")
