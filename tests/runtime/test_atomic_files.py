from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from littrainer.runtime.atomic_files import write_atomically


def test_a_text_is_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for content in (b"\x89PNG\r\n", "first, longer", "zweitens: ä"):
        write_atomically(path, content)
        assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink() and target.read_text() == "new"


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failure_leaves_what_was_there_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text("old")

    def fail(*_: Any) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(PermissionError, match="what it held before is kept") as caught:
        write_atomically(path, "new")
    assert caught.value.filename == str(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("")
    with pytest.raises(NotADirectoryError, match="nothing was written") as caught:
        write_atomically(tmp_path / "folder" / "file.json", "new")
    assert str(caught.value.filename) == str(tmp_path / "folder" / "file.json")
