"""Access tokens are found in texts and files of any size, those of who is logged in as well."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from littrainer.hub.failures import tells, text_of
from littrainer.hub.tokens import (
    BLOCK_BYTES,
    SEARCHED_OF_TENSORS,
    holds_secret,
    remove_files_with_secrets,
    secrets_of,
    without_tokens,
)

TOKEN = "hf_" + "q9Zz" * 8
SECRET = b"not like a token of the Hub"


@pytest.fixture(autouse=True)
def nobody_is_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "home" / "token"))


def test_the_token_that_is_logged_in_is_in_no_text_of_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("Bearer by-variable and by-file are not welcome")
    assert not tells(error) and "by-file" in text_of(error)
    monkeypatch.setenv("HF_TOKEN", "by-variable")
    assert tells(error) and text_of(error) == "ValueError: Bearer <HUB_TOKEN> and by-file are not welcome"
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text("by-file\n")
    assert tells(error) and text_of(error) == "ValueError: Bearer by-variable and <HUB_TOKEN> are not welcome"
    assert secrets_of("given\n", None) == (b"given", b"by-file")


def test_what_looks_like_a_token_is_in_no_text_of_an_error_whosever_it_is() -> None:
    assert without_tokens(f"[{TOKEN}] and hf_short") == "[<HUB_TOKEN>] and hf_short"
    assert tells(ValueError(TOKEN)) and not tells(ValueError("hf_short"))


@pytest.mark.parametrize("before", [0, BLOCK_BYTES - len(SECRET), BLOCK_BYTES - 5, BLOCK_BYTES - 1, 17 << 20])
def test_a_secret_is_found_in_a_file_of_any_size(tmp_path: Path, before: int) -> None:
    with (tmp_path / "debug.log").open("wb") as file:
        file.seek(before)
        file.write(SECRET)
    assert holds_secret(tmp_path / "debug.log", (b"another", SECRET))
    assert not holds_secret(tmp_path / "debug.log", (b"another",))


@pytest.mark.parametrize(("before", "is_found"), [(1000, True), (SEARCHED_OF_TENSORS, False)])
def test_of_tensors_the_part_is_searched_in_which_their_names_stand(
    tmp_path: Path, before: int, is_found: bool
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.seek(before)
        file.write(SECRET)
    assert holds_secret(tmp_path / "model.safetensors", (SECRET,)) is is_found


def test_a_file_with_a_secret_is_removed_and_named_by_where_it_came_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("checkpoint-2", "pushed"):
        (tmp_path / folder / "a").mkdir(parents=True)
        (tmp_path / folder / "a" / "arguments.json").write_bytes(SECRET)
        (tmp_path / folder / "a" / "config.json").write_bytes(b"{}")
    remove_files_with_secrets(tmp_path / "pushed", (SECRET,), (tmp_path, tmp_path / "checkpoint-2"))
    assert [path.name for path in (tmp_path / "pushed" / "a").iterdir()] == ["config.json"]
    assert f"{tmp_path / 'checkpoint-2' / 'a' / 'arguments.json'} is not pushed to the Hub" in caplog.text
