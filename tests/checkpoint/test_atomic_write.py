from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from littrainer.checkpoint import atomic_write
from littrainer.checkpoint.atomic_write import (
    STAGING_DIR,
    clean_staging_dir,
    delete_atomically,
    write_folder_atomically,
)
from littrainer.checkpoint.checksums import read_manifest, read_manifest_or_empty, write_manifest
from littrainer.checkpoint.verification import find_damage, find_edits


def write(final: Path, **files: str) -> None:
    with write_folder_atomically(final) as folder:
        for name, text in files.items():
            (folder / name).write_text(text)


def list_sequences(run_dir: Path, *steps: int) -> list[int | None]:
    return [read_manifest_or_empty(run_dir / f"checkpoint-{step}").sequence for step in steps]


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != "littrainer_manifest.json"}


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-5"
    with write_folder_atomically(final) as folder:
        (folder / "a").touch()
        # Overrides of Trainer methods read the step from the name.
        assert folder == tmp_path / STAGING_DIR / "checkpoint-5" and not final.exists()
    assert find_damage(final) == [] and set(read_manifest(final).files) == {"a"}  # type: ignore[union-attr]
    assert os.listdir(tmp_path) == ["checkpoint-5"]


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), OSError(errno.EIO, "x")], ids=repr)
def test_an_exception_leaves_everything_unchanged(tmp_path: Path, error: BaseException, existed: bool) -> None:
    final = tmp_path / "checkpoint-5"
    if existed:
        write(final, a="before")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with pytest.raises(type(error)), write_folder_atomically(final) as folder:
        (folder / "a").write_text("half")
        raise error
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    assert not existed or contents(final) == {"a": "before"}


def test_an_earlier_folder_is_replaced_except_files_that_a_user_added(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-5"
    final.mkdir()
    # As by an override of `_save_checkpoint` before `super()`.
    (final / "card").write_text("mine")
    write(final, a="before", outdated="x")
    assert contents(final) == {"a": "before", "outdated": "x", "card": "mine"} and find_edits(final) == []
    (final / "notes").write_text("mine too")
    write(final, a="after")
    assert contents(final) == {"a": "after", "notes": "mine too"} and find_edits(final) == find_damage(final) == []
    assert os.listdir(tmp_path) == ["checkpoint-5"]


class Killed(BaseException):
    """A simulated end of the process, raised again by every cleanup."""


class Kill:
    """A simulated kill after a number of calls that change the disk."""

    CALLS = tuple((os, name) for name in ("mkdir", "unlink", "rmdir", "rename", "replace"))

    def __init__(self, patch: pytest.MonkeyPatch, after: int) -> None:
        self.calls, self.after = 0, after
        for owner, name in self.CALLS:
            patch.setattr(owner, name, functools.partial(self.call, getattr(owner, name)))

    def call(self, change: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        self.calls += 1
        if self.calls > self.after:
            raise Killed
        return change(*arguments, **keywords)


def cannot_rename(patch: pytest.MonkeyPatch, is_kept: Callable[[Path], bool]) -> None:
    """Make renames fail, as in the lower layer of an overlay."""
    original = os.rename

    def rename(source: Path, target: Path) -> None:
        if is_kept(Path(source)):
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(source), None, str(target))
        original(source, target)

    patch.setattr(os, "rename", rename)


def is_incomplete(folder: Path) -> bool:
    return not any((folder / name).exists() for name in atomic_write.MARKER_FILES)


@pytest.mark.parametrize("is_in_overlay", [False, True])
@pytest.mark.parametrize("with_manifest", [True, False], ids=["ours", "of transformers"])
def test_a_kill_during_replacement_or_deletion_leaves_only_complete_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_manifest: bool, is_in_overlay: bool
) -> None:
    if is_in_overlay:
        cannot_rename(monkeypatch, lambda folder: folder.parent.name != STAGING_DIR)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    files = {"b": "x", "trainer_state.json": '{"global_step": 5}'}
    ends = []
    for after in itertools.count():
        run_dir = tmp_path / str(after)
        final, older = run_dir / "checkpoint-5", run_dir / "checkpoint-4"
        for folder in (final, older):
            folder.mkdir(parents=True)
            for name, text in {"a": "before", **files}.items():
                (folder / name).write_text(text)
            if with_manifest:
                write_manifest(folder)
        with monkeypatch.context() as patch:
            kill = Kill(patch, after)
            with contextlib.suppress(Killed):
                write(final, a="after", **files)
                delete_atomically(older)
        for folder in filter(Path.exists, (final, older)):
            assert is_incomplete(folder) or contents(folder).keys() == {"a", *files}, after
        # The next run may be killed too.
        for soon in (after % 3, after % 7, after % 23):
            with monkeypatch.context() as patch, contextlib.suppress(Killed):
                Kill(patch, soon)
                clean_staging_dir(run_dir)
        clean_staging_dir(run_dir)
        assert contents(final) in ({"a": "before", **files}, {"a": "after", **files}), after
        assert not is_incomplete(final) and set(os.listdir(run_dir)) <= {"checkpoint-4", "checkpoint-5"}, after
        is_there = older.exists() and not is_incomplete(older)
        assert not is_there or contents(older) == {"a": "before", **files}, after
        assert read_manifest(final) is None or find_edits(final) == find_damage(final) == [], after
        ends.append((contents(final)["a"], is_there))
        if kill.calls <= after:
            break
    assert list(dict.fromkeys(ends)) == [("before", True), ("after", True), ("after", False)]


def test_incomplete_staging_folders_are_removed_and_complete_folders_are_renamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("mydata-2024", "checkpoint-2", "checkpoint-5"):
        (tmp_path / folder).mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").touch()
    staging = tmp_path / STAGING_DIR
    complete, incomplete = ("checkpoint-2", "checkpoint-5", "checkpoint-7"), ("checkpoint-4", "mydata-2024")
    for name in (
        *complete,
        *incomplete,
        "checkpoint-6.process1",
        "checkpoint-8.deleted",
        "mydata-2024.deleted",
        "somebody's",
    ):
        (staging / name).mkdir(parents=True)
        (staging / name / "file").touch()
        if name in complete or name == "checkpoint-8.deleted":
            write_manifest(staging / name)
    clean_staging_dir(tmp_path)
    assert os.listdir(staging) == ["somebody's"]
    assert sorted(path.name for path in tmp_path.glob("*-*")) == [*complete, "mydata-2024"]
    assert os.listdir(tmp_path / "checkpoint-2") == ["trainer_state.json"]
    for name in ("checkpoint-5", "checkpoint-7"):
        assert contents(tmp_path / name) == {"file": ""} and f"{name} is complete" in caplog.text
    clean_staging_dir(tmp_path / "nowhere")


def test_checkpoints_are_numbered_in_the_order_of_writing(tmp_path: Path) -> None:
    for step in (10, 20, 5):
        write(tmp_path / f"checkpoint-{step}", a="x")
    assert list_sequences(tmp_path, 10, 20, 5) == [1, 2, 3]
    (tmp_path / "checkpoint-20" / "littrainer_manifest.json").write_text("{")
    (tmp_path / "checkpoint-10" / "littrainer_manifest.json").unlink()
    assert list_sequences(tmp_path, 10, 20, 5) == [None, None, 3]


def test_deleting_a_link_leaves_its_target(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "checkpoint-5", a="x")
    (tmp_path / "checkpoint-5").symlink_to(tmp_path / "elsewhere" / "checkpoint-5")
    delete_atomically(tmp_path / "checkpoint-5")
    assert os.listdir(tmp_path) == ["elsewhere"]
    assert contents(tmp_path / "elsewhere" / "checkpoint-5") == {"a": "x"}


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
        OSError(errno.ENOSPC, "No space left on device", "optimizer.pt"),
    ],
    ids=repr,
)
def test_a_full_disk_error_names_checkpoint_file_free_space_and_remedy(tmp_path: Path, error: Any) -> None:
    file = getattr(error, "filename", None) or "weights"
    message = rf"checkpoint-5 could not be written beyond {file}.*7 bytes.*are free"
    with pytest.raises(OSError, match=message) as caught, write_folder_atomically(tmp_path / "checkpoint-5") as folder:
        (folder / "weights").write_text("written")
        raise error
    assert caught.value.errno == errno.ENOSPC and caught.value.__cause__ is error
    assert "resume_from_checkpoint=True" in str(caught.value)
    assert caught.value.filename == str(tmp_path / "checkpoint-5" / file)
    assert os.listdir(tmp_path) == []


def test_log_handlers_have_a_filter_only_during_a_save(tmp_path: Path) -> None:
    handler = logging.Handler()
    logging.getLogger().addHandler(handler)
    try:
        with write_folder_atomically(tmp_path / "checkpoint-1"):
            write(tmp_path / "other" / "checkpoint-1")
            assert len(handler.filters) == 1
        assert handler.filters == []
    finally:
        logging.getLogger().removeHandler(handler)
