from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from littrainer.checkpoint import atomic_write
from littrainer.checkpoint.atomic_write import (
    UNFINISHED_DIR,
    clean_unfinished,
    rotate_checkpoints,
    sequence_of,
    set_aside_and_delete,
    staged_folder,
    wait_for_deletions,
)
from littrainer.checkpoint.checksums import file_record, read_manifest, write_manifest
from littrainer.checkpoint.verification import damage_in


def write(final: Path, **files: str) -> None:
    with staged_folder(final) as folder:
        for name, text in files.items():
            (folder / name).write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != "littrainer_manifest.json"}


def test_a_folder_is_there_when_it_is_complete_and_not_before(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-5"
    with staged_folder(final) as folder:
        (folder / "a").touch()
        # Overrides of Trainer methods read the step from the name.
        assert folder == tmp_path / UNFINISHED_DIR / "checkpoint-5" and not final.exists()
    assert damage_in(final) == [] and set(read_manifest(final).files) == {"a"}  # type: ignore[union-attr]
    assert os.listdir(tmp_path) == ["checkpoint-5"]


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), OSError(errno.EIO, "x")], ids=repr)
def test_after_an_exception_everything_is_as_it_was(tmp_path: Path, error: BaseException, existed: bool) -> None:
    final = tmp_path / "checkpoint-5"
    if existed:
        write(final, a="before")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with pytest.raises(type(error)), staged_folder(final) as folder:
        (folder / "a").write_text("half")
        raise error
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    assert not existed or contents(final) == {"a": "before"}


def test_an_earlier_folder_of_that_name_is_replaced(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-5"
    write(final, a="before", outdated="x")
    write(final, a="after")
    assert contents(final) == {"a": "after"} and damage_in(final) == []
    assert os.listdir(tmp_path) == ["checkpoint-5"]


def test_what_a_user_added_to_the_folder_that_is_replaced_is_kept(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-5"
    write(final, a="before")
    (final / "notes").write_text("mine")
    write(final, a="after")
    assert contents(final) == {"a": "after", "notes": "mine"} and damage_in(final) == []


def test_what_an_override_wrote_there_beforehand_is_kept(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-5"
    final.mkdir()
    (final / "card").write_text("before super()")
    write(final, a="x")
    assert contents(final) == {"a": "x", "card": "before super()"} and damage_in(final) == []


@pytest.mark.parametrize("call", range(2))
def test_a_kill_at_each_rename_loses_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    final = tmp_path / "checkpoint-5"
    write(final, a="before")
    original, calls = os.rename, []

    class Killed(BaseException):
        pass

    def kill(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) > call:
            raise Killed
        original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", kill)
        # A killed process tidies nothing up.
        patch.setattr(atomic_write.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            write(final, a="after")
    clean_unfinished(tmp_path)
    assert contents(final) == {"a": "before"} and damage_in(final) == []
    assert os.listdir(tmp_path) == ["checkpoint-5"]


def is_in_place(folder: Path) -> bool:
    """As in an overlay, whose lower layer has what an earlier run wrote."""
    return folder.parent.name != UNFINISHED_DIR


def cannot_rename_folders(patch: pytest.MonkeyPatch, is_in_lower: Callable[[Path], bool] = lambda folder: True) -> None:
    original = os.rename

    def rename(source: Path, target: Path) -> None:
        if is_in_lower(source):
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(source), None, str(target))
        original(source, target)

    patch.setattr(os, "rename", rename)


class Killed(BaseException):
    """Stands for the end of the process: once raised, it is raised again by whatever would tidy up."""


class Kill:
    """Ends the process, so to say, after a number of calls that change the disk."""

    CALLS = (
        *((os, name) for name in ("mkdir", "unlink", "rmdir", "rename")),
        (atomic_write, "to_disk"),
    )

    def __init__(self, patch: pytest.MonkeyPatch, after: int) -> None:
        self.calls, self.after = 0, after
        for owner, name in self.CALLS:
            patch.setattr(owner, name, functools.partial(self.call, getattr(owner, name)))

    def call(self, change: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        self.calls += 1
        if self.calls > self.after:
            raise Killed
        return change(*arguments, **keywords)


def is_half(folder: Path) -> bool:
    return not any((folder / name).exists() for name in atomic_write.TELLING_FILES)


@pytest.mark.parametrize("with_manifest", [True, False], ids=["ours", "of transformers"])
def test_a_kill_anywhere_while_folders_go_file_by_file_leaves_whole_ones_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_manifest: bool
) -> None:
    cannot_rename_folders(monkeypatch, is_in_place)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    files = {"b": "x", "trainer_state.json": "{}"}
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
                set_aside_and_delete(older)
        for folder in filter(Path.exists, (final, older)):
            assert is_half(folder) or contents(folder).keys() == {"a", *files}, after
        # The next run may be killed too.
        for soon in (after % 3, after % 7, after % 23):
            with monkeypatch.context() as patch, contextlib.suppress(Killed):
                Kill(patch, soon)
                clean_unfinished(run_dir)
        clean_unfinished(run_dir)
        assert contents(final) in ({"a": "before", **files}, {"a": "after", **files}), after
        whole = [folder for folder in (final, older) if folder.exists() and not is_half(folder)]
        assert older not in whole or contents(older) == {"a": "before", **files}, after
        assert set(os.listdir(run_dir)) <= {"checkpoint-4", "checkpoint-5"}, after
        for folder in whole:
            manifest = read_manifest(folder)
            # What a kill stopped the deletion of may lack its manifest, and be complete.
            has_manifest = with_manifest or contents(folder)["a"] == "after"
            assert (manifest is not None) == has_manifest or folder == older, after
            records = {name: file_record(folder / name) for name in contents(folder)}
            assert manifest is None or manifest.files == records, after
        ends.append((contents(final)["a"], older in whole))
        if kill.calls <= after:
            break
    assert list(dict.fromkeys(ends)) == [("before", True), ("after", True), ("after", False)]


def test_a_copy_is_on_the_disk_before_the_folder_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "checkpoint-5"
    write(final, a="before")
    (final / "link").symlink_to("nowhere")
    cannot_rename_folders(monkeypatch, is_in_place)
    unlink, on_disk, were_on_disk = os.unlink, set[Path](), list[set[Path]]()
    monkeypatch.setattr(atomic_write, "to_disk", on_disk.add)

    def noting(path: Path, **keywords: Any) -> None:
        if Path(path) == final / "littrainer_manifest.json":
            were_on_disk.append(set(on_disk))
        unlink(path, **keywords)

    monkeypatch.setattr(os, "unlink", noting)
    write(final, a="after")
    copy = tmp_path / UNFINISHED_DIR / "checkpoint-5.copy"
    assert were_on_disk == [{copy.parent, copy, copy / "a", copy / "littrainer_manifest.json"}]
    assert contents(final) == {"a": "after"}


@pytest.mark.parametrize("is_in_lower", [True, False])
def test_a_new_folder_that_cannot_be_put_in_place_leaves_the_earlier_one_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_lower: bool
) -> None:
    final = tmp_path / "checkpoint-5"
    write(final, a="before")
    new = tmp_path / UNFINISHED_DIR / final.name
    cannot_rename_folders(monkeypatch, lambda folder: folder == new or (is_in_lower and folder == final))
    with pytest.raises(OSError, match="cross-device"):
        write(final, a="after")
    assert os.listdir(tmp_path) == ["checkpoint-5"]
    assert contents(final) == {"a": "before"} and damage_in(final) == []


def test_no_folder_is_deleted_for_the_name_of_what_lies_among_unfinished_ones(tmp_path: Path) -> None:
    (tmp_path / "mydata-2024").mkdir()
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "model.safetensors").touch()
    for name in ("mydata-2024.deleted", "mydata-2024.copy", "checkpoint-5.deleted"):
        (tmp_path / UNFINISHED_DIR / name).mkdir(parents=True)
    clean_unfinished(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-5", "mydata-2024"]


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """A run's folder with three checkpoints in the lower layer of an overlay, as in an image that holds a run."""
    lower, upper, work, merged = (tmp_path / name for name in ("lower", "upper", "work", "merged"))
    for folder in (lower, upper, work, merged):
        folder.mkdir()
    for step in (2, 4, 6):
        write(lower / f"checkpoint-{step}", a="before")
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    made = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], capture_output=True, check=False
    )
    if not made or made.returncode:
        pytest.skip("an overlay cannot be mounted here")
    yield merged
    subprocess.run(["umount", str(merged)], check=True)


def test_checkpoints_in_the_lower_layer_of_an_overlay_are_replaced_and_deleted(overlay: Path) -> None:
    with pytest.raises(OSError, match="cross-device"):
        os.rename(overlay / "checkpoint-2", overlay / "elsewhere")
    write(overlay / "checkpoint-6", a="after")
    assert contents(overlay / "checkpoint-6") == {"a": "after"} and damage_in(overlay / "checkpoint-6") == []
    rotate_checkpoints(overlay, save_total_limit=1, in_background=True)
    assert os.listdir(overlay) == ["checkpoint-6"]


def test_a_link_or_a_file_where_unfinished_checkpoints_lie_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    elsewhere, run_dir = tmp_path / "elsewhere", tmp_path / "run"
    (elsewhere / "mydata-2024").mkdir(parents=True)
    run_dir.mkdir()
    place = run_dir / UNFINISHED_DIR
    for fill, told in ((lambda: place.symlink_to(elsewhere), "a link"), (place.touch, "a file")):
        fill()
        for use in (clean_unfinished, lambda folder: write(folder / "checkpoint-2", a="x"), set_aside_in):
            with pytest.raises(OSError, match=rf"{told}.*{re.escape(str(place))}"):
                use(run_dir)
        assert os.listdir(elsewhere) == ["mydata-2024"] and os.listdir(run_dir) == [UNFINISHED_DIR]
        place.unlink()


def set_aside_in(run_dir: Path) -> None:
    set_aside_and_delete(run_dir / "checkpoint-2")


def test_what_killed_runs_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-2", a="x")
    unfinished = tmp_path / UNFINISHED_DIR
    for name in ("checkpoint-4", "checkpoint-1.deleted", "checkpoint-2.replaced", "somebody's"):
        (unfinished / name).mkdir(parents=True)
        (unfinished / name / "file").touch()
    clean_unfinished(tmp_path)
    assert os.listdir(unfinished) == ["somebody's"]
    assert contents(tmp_path / "checkpoint-2") == {"a": "x"}
    clean_unfinished(tmp_path / "nowhere")


def test_checkpoints_are_numbered_in_the_order_of_writing(tmp_path: Path) -> None:
    for step in (10, 20, 5):
        write(tmp_path / f"checkpoint-{step}", a="x")
    assert [sequence_of(tmp_path / f"checkpoint-{step}") for step in (10, 20, 5)] == [1, 2, 3]
    (tmp_path / "checkpoint-20" / "littrainer_manifest.json").write_text("{")
    (tmp_path / "checkpoint-10" / "littrainer_manifest.json").unlink()
    assert [sequence_of(tmp_path / f"checkpoint-{step}") for step in (10, 20, 5)] == [None, None, 3]


def test_a_link_to_a_checkpoint_is_deleted_and_not_what_it_leads_to(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "checkpoint-5", a="x")
    (tmp_path / "checkpoint-5").symlink_to(tmp_path / "elsewhere" / "checkpoint-5")
    set_aside_and_delete(tmp_path / "checkpoint-5")
    assert os.listdir(tmp_path) == ["elsewhere"]
    assert contents(tmp_path / "elsewhere" / "checkpoint-5") == {"a": "x"}


def test_a_deletion_is_waited_for_again_after_ctrl_c_has_interrupted_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "checkpoint-5", a="x")
    opened = threading.Event()
    original = atomic_write._delete_or_warn

    def slowly(aside: Path) -> None:
        opened.wait()
        original(aside)

    monkeypatch.setattr(atomic_write, "_delete_or_warn", slowly)
    set_aside_and_delete(tmp_path / "checkpoint-5", in_background=True)
    assert os.listdir(tmp_path) == [UNFINISHED_DIR]
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        wait_for_deletions()
    threading.Timer(0.1, opened.set).start()
    wait_for_deletions()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
    ],
    ids=repr,
)
def test_a_full_disk_is_told_with_checkpoint_file_room_and_what_to_do(tmp_path: Path, error: Exception) -> None:
    told = r"checkpoint-5 could not be written beyond weights.*7 bytes.*are free"
    with pytest.raises(OSError, match=told) as caught, staged_folder(tmp_path / "checkpoint-5") as folder:
        (folder / "weights").write_text("written")
        raise error
    assert caught.value.errno == errno.ENOSPC and caught.value.__cause__ is error
    assert "resume_from_checkpoint=True" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_file_that_the_system_names_is_the_one_that_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=r"beyond optimizer\.pt") as caught,
        staged_folder(tmp_path / "checkpoint-5") as folder,
    ):
        (folder / "config.json").write_text("written")
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "optimizer.pt"))
    assert caught.value.filename == str(tmp_path / "checkpoint-5" / "optimizer.pt")
