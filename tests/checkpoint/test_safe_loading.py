from __future__ import annotations

from pathlib import Path

import pytest
import torch

from littrainer.checkpoint.safe_loading import load_safetensors, load_tensors, resolve_inside
from tests.checkpoint.malicious import Creates


def test_a_file_of_torch_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": list(range(3000)), "b": [1, 0.5, "text", None, True, torch.ones(2)]}, path)
    assert load_tensors(path)["b"][:5] == [1, 0.5, "text", None, True]
    content = path.read_bytes()
    for parts in range(2, 9):
        path.write_bytes(content[: len(content) // parts])
        with pytest.raises(ValueError, match=r"file\.pt is damaged"):
            load_tensors(path)


def test_code_is_refused_and_has_not_run(tmp_path: Path) -> None:
    torch.save({"a": [Creates(tmp_path / "was-run")]}, tmp_path / "file.pt")
    with pytest.raises(ValueError, match=r"file\.pt is refused: it names pathlib\.Path\.touch|it names \S+, which"):
        load_tensors(tmp_path / "file.pt")
    assert not (tmp_path / "was-run").exists()


def test_what_is_allowed_for_one_file_is_refused_in_the_next(tmp_path: Path) -> None:
    torch.save(Path("a"), tmp_path / "file.pt")
    posix_path = type(Path())
    load_tensors(tmp_path / "file.pt", [posix_path])
    with pytest.raises(ValueError, match="is refused"):
        load_tensors(tmp_path / "file.pt")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a file of torch", b"\x80\x02"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    for load in (load_tensors, load_safetensors):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ValueError, match=r"file is damaged: .*Resume from another checkpoint"):
            load(tmp_path / "file")


@pytest.mark.parametrize("name", ["../a", "/a", "b/a", "..", ".", "", "b\\a", None, 3])
def test_only_a_name_in_the_folder_itself_is_taken_from_an_index(tmp_path: Path, name: object) -> None:
    with pytest.raises(ValueError, match=r"index\.json is refused: it names"):
        resolve_inside(tmp_path, name, tmp_path / "index.json")
