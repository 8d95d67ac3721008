from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers.trainer
import transformers.utils
from transformers import trainer_utils as theirs

from littrainer.checkpoint import layout as ours
from littrainer.checkpoint import retention
from littrainer.checkpoint.checksums import write_manifest
from littrainer.checkpoint.manager import get_last_checkpoint
from littrainer.checkpoint.retention import rotate_checkpoints, sort_checkpoints
from tests.scenarios.trainers import quiet_trainer

# Folder name -> modification time in seconds.
FOLDERS: dict[str, dict[str, float]] = {
    "none": {},
    "one": {"checkpoint-5": 1000},
    "by step, not by name": {"checkpoint-20": 1000, "checkpoint-100": 1010, "checkpoint-3": 1020},
    "times too close to tell": {"checkpoint-30": 1000, "checkpoint-4": 1000.5, "checkpoint-10": 1000.9},
    "overwritten later": {"checkpoint-10": 1500, "checkpoint-20": 1000, "checkpoint-30": 1200},
    "among others": {"checkpoint-7": 1000, "runs": 1001, "my-checkpoint-9": 1002},
}
OPTIONS: list[dict[str, Any]] = [{}, {"use_mtime": True}, {"checkpoint_prefix": "my-checkpoint"}]


def make_folders(root: Path, times: dict[str, float]) -> Path:
    root.mkdir()
    for name, seconds in times.items():
        (root / name).mkdir()
        (root / name / "file").touch()
        os.utime(root / name, (seconds, seconds))
    (root / "checkpoint-999").touch()
    return root


def folders_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


every_layout = pytest.mark.parametrize("times", FOLDERS.values(), ids=FOLDERS.keys())


@every_layout
def test_get_last_checkpoint_equals_that_of_transformers(tmp_path: Path, times: dict[str, float]) -> None:
    root = make_folders(tmp_path / "out", times)
    for folder in [path for path in root.glob("checkpoint-*") if path.is_dir()]:
        write_manifest(folder)
    last = get_last_checkpoint(str(root))
    assert last == theirs.get_last_checkpoint(str(root))
    assert get_last_checkpoint(root) == last


@every_layout
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_checkpoints_are_sorted_as_transformers_sorts_them(
    tmp_path: Path, times: dict[str, float], options: dict[str, Any]
) -> None:
    root = make_folders(tmp_path / "out", times)
    for best in (None, f"{root}//checkpoint-20/", str(root / "checkpoint-30"), "checkpoint-404"):
        expected = theirs.sort_checkpoints(str(root), best_model_checkpoint=best, **options)
        assert sort_checkpoints(str(root), best_model_checkpoint=best, **options) == expected, best


@every_layout
@pytest.mark.parametrize(("use_mtime", "best"), [(False, None), (True, "checkpoint-20"), (False, "checkpoint-404")])
def test_rotation_deletes_what_transformers_deletes(
    tmp_path: Path, times: dict[str, float], use_mtime: bool, best: str | None
) -> None:
    for limit in (None, 0, -1, 1, 2, 9):
        remaining = {}
        for name, library in (("ours", retention), ("theirs", theirs)):
            root = make_folders(tmp_path / f"{name} {limit}", times)
            best_folder = None if best is None else str(root / best)
            library.rotate_checkpoints(
                str(root), save_total_limit=limit, best_model_checkpoint=best_folder, use_mtime=use_mtime
            )
            remaining[name] = sorted(os.listdir(root))
        assert remaining["ours"] == remaining["theirs"], limit


def write_in_order(root: Path, times: dict[str, float]) -> Path:
    """Make folders with manifests in this order, and with other times."""
    make_folders(root, times)
    for number, name in enumerate(times):
        write_manifest(root / name, sequence=number)
        os.utime(root / name, (times[name], times[name]))
    return root


CLOCK_SET_BACK = {"checkpoint-2": 5000.0, "checkpoint-4": 5010.0, "checkpoint-6": 1000.0}


def test_a_clock_that_was_set_back_does_not_change_the_order(tmp_path: Path) -> None:
    root = write_in_order(tmp_path / "ours", CLOCK_SET_BACK)
    assert [Path(path).name for path in sort_checkpoints(root, use_mtime=True)] == list(CLOCK_SET_BACK)
    without_manifests = make_folders(tmp_path / "theirs", CLOCK_SET_BACK)
    for folder, newest in ((root, None), (without_manifests, str(without_manifests / "checkpoint-6"))):
        rotate_checkpoints(folder, save_total_limit=1, use_mtime=True, newest=newest)
        assert folders_in(folder) == ["checkpoint-6"]


def test_folders_with_text_after_the_step_are_no_checkpoints(tmp_path: Path) -> None:
    names = ["checkpoint-5-old", "checkpoint-best", "checkpoint-", "checkpoint-1a", ".checkpoint-7", "checkpoint--3"]
    root = make_folders(tmp_path / "out", {"checkpoint-2": 1000, "checkpoint-3": 1000, **dict.fromkeys(names, 2000)})
    for name in names:
        write_manifest(root / name)
    assert sort_checkpoints(root) == [str(root / "checkpoint-2"), str(root / "checkpoint-3")]
    rotate_checkpoints(root, save_total_limit=1, use_mtime=True)
    assert all((root / name).is_dir() for name in names) and not (root / "checkpoint-2").exists()
    assert get_last_checkpoint(root) is None


def test_damaged_checkpoints_are_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write_in_order(tmp_path / "out", {"checkpoint-1": 1000, "checkpoint-2": 1000, "checkpoint-3": 1000})
    (root / "checkpoint-3" / "file").unlink()
    assert get_last_checkpoint(str(root)) == str(root / "checkpoint-2")
    (warning,) = caplog.records
    assert "checkpoint-3: file is missing." in warning.getMessage()
    assert f"{root / 'checkpoint-2'} is the newest intact one" in warning.getMessage()
    for step in (1, 2):
        (root / f"checkpoint-{step}" / "file").unlink()
    assert get_last_checkpoint(root) is None and "no intact one before it" in caplog.text


def test_a_failed_deletion_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_folders(tmp_path / "out", FOLDERS["by step, not by name"])

    def refuse(path: str, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    rotate_checkpoints(root, save_total_limit=2)
    assert "checkpoint-3" in caplog.text and "Permission denied" in caplog.text


def test_an_output_dir_that_cannot_be_made_is_an_error_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(OSError, match=r"link is a link to gone, where there is no folder"):
        quiet_trainer(tmp_path / "link")
    # Even root cannot make a folder below a file.
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        OSError, match=r"Uploads to memory://bucket/run are written to .* cannot be made .*XDG_CACHE_HOME"
    ):
        quiet_trainer("memory://bucket/run")


def test_files_have_the_names_of_transformers() -> None:
    homes = (transformers.trainer, transformers.utils, theirs)
    names = [name for name in dir(ours) if name.endswith("_NAME") or name == "PREFIX_CHECKPOINT_DIR"]
    expected = {name: getattr(home, name) for home in homes for name in names if hasattr(home, name)}
    assert len(expected) >= 9 and {name: getattr(ours, name) for name in expected} == expected
