"""Access tokens are found in texts and files of any size, those of who is logged in as well."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from littrainer.hub.repository import (
    secrets_of,
    shows_token,
    text_of,
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
    assert not shows_token(str(error)) and "by-file" in text_of(error)
    monkeypatch.setenv("HF_TOKEN", "by-variable")
    assert shows_token(str(error)) and text_of(error) == "ValueError: Bearer <HUB_TOKEN> and by-file are not welcome"
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text("by-file\n")
    assert (
        shows_token(str(error)) and text_of(error) == "ValueError: Bearer by-variable and <HUB_TOKEN> are not welcome"
    )
    assert secrets_of("given\n", None) == (b"given", b"by-file")


def test_what_looks_like_a_token_is_in_no_text_of_an_error_whosever_it_is() -> None:
    assert without_tokens(f"[{TOKEN}] and hf_short") == "[<HUB_TOKEN>] and hf_short"
    assert shows_token(TOKEN) and not shows_token("hf_short")
