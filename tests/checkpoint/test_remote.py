"""Runs whose output_dir is a URL; tests/faults has an unreliable file system."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
from fsspec.core import url_to_fs
from safetensors.torch import load_file

from littrainer import Trainer, TrainerCallback, get_last_checkpoint
from littrainer.checkpoint import remote
from littrainer.checkpoint.atomic_write import RANK_SUFFIX, STAGING_DIR
from littrainer.checkpoint.checksums import MANIFEST_NAME, FileRecord, write_manifest
from littrainer.checkpoint.manager import CheckpointManager
from littrainer.checkpoint.remote import MARKER_NAME, RemoteRun
from littrainer.checkpoint.retention import thin_checkpoint
from littrainer.checkpoint.store import Store, get_store
from littrainer.cli import main
from littrainer.runtime.remote_folder import (
    RemoteFolder,
    RemoteFolderError,
    get_remote_url,
    local_folder,
    strip_credentials,
)
from tests.scenarios.trainers import quiet_trainer

Move = Callable[[str], Path]


@pytest.fixture
def move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Move:
    """Switch to a machine with this name and a separate disk; the first is "one"."""

    def to(machine: str) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        return tmp_path / machine

    to("one")
    return to


@pytest.fixture
def address(tmp_path: Path, move: Move) -> str:
    return f"memory://bucket{tmp_path}/run"


def make(address: str, **changes: Any) -> Trainer:
    return quiet_trainer(address, **{"max_steps": 6, "save_strategy": "steps", "save_steps": 2, **changes})


def names_at(address: str, pattern: str = "checkpoint-*/" + MANIFEST_NAME) -> list[str]:
    """Return names below a URL; by default of complete checkpoints."""
    files, root = url_to_fs(address)
    files.invalidate_cache()
    return sorted(
        path.removeprefix(f"{root}/").removesuffix(f"/{MANIFEST_NAME}")
        for path, info in files.glob(f"{root}/{pattern}", detail=True).items()
        if info["size"] or info["type"] == "directory"
    )


class At(TrainerCallback):
    """A callback that calls a function at a step's begin or save."""

    def __init__(self, step: int, do: Callable[[], object], on_save: bool = False) -> None:
        self.step, self.do, self.on_save_too = step, do, on_save

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step and not self.on_save_too:
            self.do()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step and self.on_save_too:
            self.do()


def newest_of(address: str, **options: Any) -> str:
    """Return the name of the newest checkpoint."""
    return os.path.basename(get_last_checkpoint(address, **options) or "none")


def wait_for_uploads(trainer: Trainer) -> None:
    """Wait for the upload thread."""
    run = get_store(trainer.args.output_dir).remote
    assert run is not None and run._thread is not None
    run._thread.join(60)


def refuse_writes(monkeypatch: pytest.MonkeyPatch, refused: list[str]) -> None:
    """Make uploads fail for names with these prefixes, which the caller may remove from the list."""
    original = RemoteFolder.write

    def write(self: RemoteFolder, name: str, content: Any) -> None:
        if name.startswith(tuple(refused)):
            raise RemoteFolderError(f"{self.url}/{name} could not be written (no network).")
        original(self, name, content)

    monkeypatch.setattr(RemoteFolder, "write", write)


def stop() -> None:
    raise InterruptedError("the machine is taken away")


def test_a_run_resumes_exactly_on_a_machine_with_an_empty_disk(tmp_path: Path, move: Move) -> None:
    settings = {"save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    uninterrupted = make(str(tmp_path / "uninterrupted"), **settings)
    uninterrupted.train()
    # The parent folder is missing.
    address = f"file://{tmp_path}/remote/run"
    first = make(address, **settings)
    first.add_callback(At(4, stop))
    with pytest.raises(InterruptedError):
        first.train()
    assert names_at(address) == ["checkpoint-2", "checkpoint-4"]
    move("two")
    second = make(address, **settings)
    second.train(resume_from_checkpoint=True)
    assert names_at(address) == ["checkpoint-4", "checkpoint-6"]
    # The rotation on the second machine counts remote-only checkpoints.
    assert names_at(address, "checkpoint-2*") == []
    for name, value in uninterrupted.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])
    assert second.state.best_model_checkpoint == os.path.join(second.args.output_dir, "checkpoint-6")


def test_the_best_model_is_downloaded_too(address: str, move: Move) -> None:
    settings: dict[str, Any] = {"save_total_limit": 2, "load_best_model_at_end": True, "metric_for_best_model": "score"}
    scores = iter([3.0, 1.0, 2.0])

    def score(_: Any) -> dict[str, float]:
        return {"score": next(scores)}

    def run(**changes: Any) -> Trainer:
        return make(
            address,
            trainer_kwargs={"compute_metrics": score},
            eval_strategy="steps",
            eval_steps=2,
            greater_is_better=True,
            **settings,
            **changes,
        )

    first = run()
    first.add_callback(At(4, stop))
    with pytest.raises(InterruptedError):
        first.train()
    move("two")
    second = run()
    second.train(resume_from_checkpoint=True)
    assert second.state.best_model_checkpoint == os.path.join(second.args.output_dir, "checkpoint-2")
    best = load_file(os.path.join(second.state.best_model_checkpoint, "model.safetensors"))
    assert all(torch.equal(value, best[name]) for name, value in second.model.state_dict().items())
    assert names_at(address) == ["checkpoint-2", "checkpoint-6"]


def test_saves_after_training_are_uploaded_and_reported(
    address: str, move: Move, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make(address, logging_strategy="steps", logging_steps=1)
    trainer.train()
    trainer.save_model()
    trainer.save_metrics("train", {"train_loss": 0.5})
    trainer.save_model(f"{address}-copy")
    assert {"model.safetensors", "train_results.json", "littrainer_run.json"} <= {*names_at(address, "*")}
    assert "model.safetensors" in names_at(f"{address}-copy", "*")
    there = move("two")
    there.mkdir()
    monkeypatch.chdir(there)
    assert main(["report", address, "--no-png"]) == 0
    assert "Learning rate" in (there / "report.html").read_text("utf-8")
    assert main(["report", f"{address}-none"]) == 2
    assert "trainer_state.json" in capsys.readouterr().err


def test_a_checkpoint_is_resumed_by_its_url_and_refused_if_missing(address: str, move: Move) -> None:
    make(address).train()
    move("two")
    trainer = make(f"{address}-next", max_steps=8)
    trainer.train(resume_from_checkpoint=f"{address}/checkpoint-4")
    assert trainer.state.global_step == 8 and names_at(f"{address}-next") == ["checkpoint-6", "checkpoint-8"]
    with pytest.raises(ValueError, match=f"valid checkpoint at {address}/checkpoint-9: there is no such folder"):
        trainer.train(resume_from_checkpoint=f"{address}/checkpoint-9")
    with pytest.raises(ValueError, match=rf"output directory \({address}-none\)"):
        make(f"{address}-none").train(resume_from_checkpoint=True)


def test_a_failed_upload_is_a_warning_with_retry_and_an_error_at_the_end(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = ["checkpoint-2/optimizer.pt", "checkpoint-6/model.safetensors"]
    refuse_writes(monkeypatch, refused)
    trainer = make(address, save_total_limit=1)

    def mend() -> None:
        wait_for_uploads(trainer)
        refused.remove("checkpoint-2/optimizer.pt")

    trainer.add_callback(At(3, mend))
    # The newest checkpoint is uploaded first, and a failed upload ends the attempt.
    trainer.add_callback(At(5, lambda: wait_for_uploads(trainer)))
    with pytest.raises(RemoteFolderError, match=f"{address}/checkpoint-6/model.safetensors.*{trainer.args.output_dir}"):
        trainer.train()
    (warning,) = [text for text in caplog.messages if "the next save" in text and "checkpoint-2" in text]
    assert "no network" in warning
    assert names_at(address) == ["checkpoint-4"], "nothing older is deleted before the newest one is safe"
    assert os.path.isdir(os.path.join(trainer.args.output_dir, "checkpoint-6"))

    refused.clear()
    make(address, max_steps=7).train(resume_from_checkpoint=True)
    assert names_at(address) == ["checkpoint-4", "checkpoint-6", "checkpoint-7"]


def test_local_checkpoints_are_deleted_only_after_a_newer_upload(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ["checkpoint-4/", "checkpoint-6/"]
    refuse_writes(monkeypatch, refused)
    trainer = make(address, max_steps=8, save_total_limit=1)
    names: list[list[str]] = []

    def record_names() -> None:
        wait_for_uploads(trainer)
        names.append(sorted(name for name in os.listdir(trainer.args.output_dir) if name.startswith("checkpoint")))

    for step, then in {3: list, 5: list, 7: refused.clear}.items():
        trainer.add_callback(At(step, record_names))
        trainer.add_callback(At(step, then))
    trainer.train()
    assert names == [["checkpoint-2"], ["checkpoint-4"], ["checkpoint-4", "checkpoint-6"]]
    assert names_at(address) == ["checkpoint-8"] and not os.path.exists(f"{trainer.args.output_dir}/checkpoint-4")


def test_a_remote_only_checkpoint_allows_deletion_of_older_local_checkpoints(address: str) -> None:
    make(address).train()
    run = RemoteRun(Path(local_folder(address)))
    run.claim()
    shutil.rmtree(run.folder / "checkpoint-4")
    # As if their uploads had failed.
    del run.manifests["checkpoint-2"], run.manifests["checkpoint-6"]
    assert [step for step in (2, 6) if run.keep_or_rotate(str(run.folder / f"checkpoint-{step}"))] == [6]


def test_an_upload_that_hangs_is_an_error_after_hang_timeout(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, ended = RemoteFolder.write, threading.Event()

    def write(self: RemoteFolder, name: str, content: Any) -> None:
        if name == "checkpoint-4/optimizer.pt":
            assert ended.wait(60)
        original(self, name, content)

    monkeypatch.setattr(RemoteFolder, "write", write)
    trainer = make(address, max_steps=4, hang_timeout=1)
    with pytest.raises(RemoteFolderError, match=f"hang_timeout.*at {address}.*in {trainer.args.output_dir}"):
        trainer.train()
    ended.set()


@pytest.mark.parametrize("by", ["auto", "address"])
def test_remote_checkpoints_without_manifest_are_resumed_and_never_deleted(
    tmp_path: Path, move: Move, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    there = tmp_path / "there" / "run"
    make(str(tmp_path / "plain"), max_steps=4).train()
    for name, step in {"checkpoint-3": 2, "checkpoint-4": 4}.items():
        shutil.copytree(
            tmp_path / "plain" / f"checkpoint-{step}", there / name, ignore=shutil.ignore_patterns("littrainer_*")
        )
    (there / "checkpoint-9").mkdir()
    (there / "checkpoint-9" / "notes.txt").write_text("mine")
    trainer, begun = make(f"file://{there}", max_steps=8, save_total_limit=1), []
    trainer.add_callback(At(0, lambda: begun.append(0)))
    trainer.train(resume_from_checkpoint="auto" if by == "auto" else f"file://{there}/checkpoint-4")
    assert begun == [] and trainer.state.global_step == 8
    assert names_at(f"file://{there}", "checkpoint-*") == [
        "checkpoint-3",
        "checkpoint-4",
        "checkpoint-8",
        "checkpoint-9",
    ]
    assert (there / "checkpoint-9" / "notes.txt").read_text() == "mine"
    assert any(
        "no manifest in checkpoint-3, checkpoint-4, checkpoint-9. They are never" in text for text in caplog.messages
    )


def test_thinned_checkpoints_are_thinned_at_the_url(address: str) -> None:
    make(address, keep_optimizer_states=1).train()
    assert names_at(address, "checkpoint-*/optimizer.pt") == ["checkpoint-6/optimizer.pt"]
    assert names_at(address) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_checkpoint_that_is_thinned_during_its_upload_is_thinned_at_the_url(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = RemoteFolder.write

    def write(self: RemoteFolder, name: str, content: Any) -> None:
        original(self, name, content)
        if name == "checkpoint-2/optimizer.pt":
            thin_checkpoint(Path(content).parent)

    monkeypatch.setattr(RemoteFolder, "write", write)
    make(address).train()
    assert names_at(address, "checkpoint-*/optimizer.pt") == ["checkpoint-4/optimizer.pt", "checkpoint-6/optimizer.pt"]


Hook = Callable[[str], Any]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Hook], None]:
    """Call a function with the path at each call of a method; a download is truncated to the size that it returns."""
    cls = fsspec.get_filesystem_class("memory")

    def patch(method: str, hook: Hook) -> None:
        original = getattr(cls, method)

        def call(self: fsspec.AbstractFileSystem, *args: Any, **kwargs: Any) -> Any:
            path = args[1] if method == "put_file" else args[0]
            size, result = hook(path), original(self, *args, **kwargs)
            if size:
                os.truncate(args[1], size)
            return result

        monkeypatch.setattr(cls, method, call)

    return patch


def deny(path: str) -> None:
    raise PermissionError("DeleteObject is not allowed")


def test_a_checkpoint_with_a_torn_manifest_is_skipped(
    address: str, move: Move, caplog: pytest.LogCaptureFixture
) -> None:
    make(address).train()
    files, root = url_to_fs(address)
    manifest = files.cat_file(f"{root}/checkpoint-6/{MANIFEST_NAME}")
    files.pipe_file(f"{root}/checkpoint-6/{MANIFEST_NAME}", manifest[:-9])
    move("two")
    assert newest_of(local_folder(address)) == "checkpoint-4"
    assert any(f"{address}/checkpoint-6 does not count" in text for text in caplog.messages)
    # The first machine's copies are intact.
    move("one")
    assert newest_of(local_folder(address)) == "checkpoint-6"


def test_a_damaged_download_is_retried_and_then_an_error(
    address: str, move: Move, memory: Callable[[str, Hook], None]
) -> None:
    make(address).train()
    files, root = url_to_fs(address)
    short = ["checkpoint-6/model.safetensors", "checkpoint-6/vocab.txt"]
    memory("get_file", lambda path: 9 if short and path.endswith(short[0]) and short.pop(0) else 0)
    move("two")
    assert newest_of(address) == "checkpoint-6" and len(short) == 1
    files.pipe_file(f"{root}/checkpoint-6/optimizer.pt", b"torn")
    move("three")
    for _ in range(2):
        with pytest.raises(RemoteFolderError, match=f"{address}/checkpoint-6.*damaged: optimizer.pt has 4 bytes"):
            make(address, save_total_limit=1).train(resume_from_checkpoint="auto")
    assert names_at(address) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_short_read_of_a_manifest_does_not_hide_a_checkpoint(
    address: str, move: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(address).train()
    cls, times = fsspec.get_filesystem_class("memory"), [0]
    original = cls.cat_file

    def cat_file(self: fsspec.AbstractFileSystem, path: str, *args: Any, **kwargs: Any) -> bytes:
        content = original(self, path, *args, **kwargs)
        times[0] -= 1
        return content[: len(content) // 2 * (times[0] % 2)] if times[0] >= 0 and "manifest" in path else content

    monkeypatch.setattr(cls, "cat_file", cat_file)
    move("two")
    for times[0] in (1, 2):
        assert newest_of(address) == "checkpoint-6"
    times[0] = 99
    with pytest.raises(RemoteFolderError, match=f"{address}/checkpoint-6/{MANIFEST_NAME} could not be read whole: "):
        get_last_checkpoint(address)


def test_a_fresh_start_deletes_no_checkpoint_of_an_earlier_run(
    address: str, move: Move, caplog: pytest.LogCaptureFixture
) -> None:
    make(address, save_steps=6).train()
    for machine in ("one", "two"):
        move(machine)
        trainer = make(address, max_steps=5, save_steps=1, save_total_limit=1)
        # As in a rollback.
        trainer.add_callback(At(3, lambda: CheckpointManager().find(f"{local_folder(address)}/checkpoint-3", "")))
        trainer.train()
        assert names_at(address) == ["checkpoint-5", "checkpoint-6"]
    assert any(f"{address} has checkpoint-6 of an earlier run" in text for text in caplog.messages)
    make(address, max_steps=7, save_total_limit=1).train(resume_from_checkpoint=True)
    assert names_at(address) == ["checkpoint-7"]


def weight(folder: str | Path) -> float:
    return sum(tensor.sum().item() for tensor in load_file(Path(folder) / "model.safetensors").values())


def test_a_newer_checkpoint_is_never_replaced_by_an_older_checkpoint(
    address: str, move: Move, memory: Callable[[str, Hook], None], caplog: pytest.LogCaptureFixture
) -> None:
    make(address, max_steps=4).train()
    is_down = [True]

    def lose(path: str) -> None:
        if is_down and not path.endswith(MARKER_NAME):
            raise ConnectionError("down")

    for method in ("put_file", "pipe_file"):
        memory(method, lose)
    # The network fails, and then recovers.
    with pytest.raises(RemoteFolderError, match="down"):
        make(address, max_steps=4, learning_rate=0.5).train()
    is_down.clear()
    newest = Path(local_folder(address)) / "checkpoint-4"
    newer = weight(newest)
    assert get_last_checkpoint(address) == str(newest) and weight(newest) == newer
    # After another machine's upload, the first machine returns with a checkpoint of unknown age.
    move("two")
    make(address, max_steps=4, learning_rate=0.25).train()
    uploaded = weight(Path(local_folder(address)) / "checkpoint-4")
    move("one")
    make(address, max_steps=5).train(resume_from_checkpoint=True)
    assert weight(newest) == uploaded
    (aside,) = newest.parent.glob(".never-uploaded-checkpoint-4-*")
    assert weight(aside) == newer and any(f"is now {aside.name}" in text for text in caplog.messages)
    move("three")
    get_last_checkpoint(address, without=["checkpoint-5"])
    assert weight(Path(local_folder(address)) / "checkpoint-4") == uploaded


@pytest.mark.parametrize("key", ["../../outside.txt", "a/../../../outside.txt", "/outside.txt", "a/./b"])
def test_keys_that_lead_out_of_a_checkpoint_are_not_downloaded(
    address: str, tmp_path: Path, move: Move, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    make(address, max_steps=2).train()
    files, root = url_to_fs(address)
    # Like object stores, the file system does not normalize keys.
    for name in ("model.safetensors", key):
        files.pipe_file(f"{root}/checkpoint-9/{name}", b"hostile")
    move("two")
    assert newest_of(address) == "checkpoint-2"
    assert any(f"{address}/checkpoint-9, which is damaged" in text for text in caplog.messages)
    assert not [*tmp_path.rglob("outside*")]


@pytest.mark.parametrize("form", ["smb://user:hunter2@host/share/run", "smb://host/share/run?sig=hunter2&b"])
def test_credentials_in_a_url_are_never_stored(form: str, move: Move, monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[str, Any]] = []

    class Share(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
        protocol, store, pseudo_dirs = "smb", {}, [""]

        @classmethod
        def _strip_protocol(cls, path: Any) -> Any:
            return "/" + str(path).removeprefix("smb://").rpartition("@")[2].strip("/")

        @classmethod
        def _get_kwargs_from_urls(cls, path: str) -> dict[str, Any]:
            options.append({"with": "hunter2" in path})
            return {}

        def cat_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
            if path.endswith("checkpoint-9/" + MANIFEST_NAME):
                raise OSError(f"no access with {form.replace('smb://', 'https://')}")
            return super().cat_file(path, *args, **kwargs)

    fsspec.register_implementation("smb", Share, clobber=True)
    trainer = make(form, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, resume_from_checkpoint=form)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    assert "/host/share/run/checkpoint-6/" + MANIFEST_NAME in Share.store and options[-1] == {"with": True}
    contents = {name: file.getvalue() for name, file in Share.store.items()}
    contents |= {str(path): path.read_bytes() for path in move("one").rglob("*") if path.is_file()}
    assert not [name for name, content in contents.items() if b"hunter2" in name.encode() + content]
    assert "hunter2" not in str(trainer.args.to_dict())
    assert get_remote_url(trainer.args.output_dir) == "smb://host/share/run"
    with pytest.raises(RemoteFolderError, match="no access with") as error:
        RemoteRun(Path(trainer.args.output_dir)).download("checkpoint-9")
    assert "hunter2" not in str(error.value)
    assert strip_credentials("abfs://container@account/run") == "abfs://container@account/run"


def test_without_the_right_to_delete_older_checkpoints_stay_complete_with_one_warning(
    address: str, move: Move, memory: Callable[[str, Hook], None], caplog: pytest.LogCaptureFixture
) -> None:
    memory("rm", deny)
    make(address, save_total_limit=1).train()
    assert names_at(address) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    (warning,) = [text for text in caplog.messages if "DeleteObject" in text]
    assert address in warning and "older checkpoints stay" in warning
    move("two")
    assert newest_of(address, without=["checkpoint-6"]) == "checkpoint-4"


ODD_MARKERS = {
    "null": b'{"checkpoints": null}',
    "deep": b"[" * 200_000,
    "a long step": json.dumps({"checkpoints": [f"checkpoint-{'9' * 5000}", f"checkpoint-{'9' * 30}", 5]}).encode(),
}


@pytest.mark.parametrize("odd", ODD_MARKERS)
def test_an_invalid_marker_is_ignored(address: str, move: Move, odd: str) -> None:
    make(address, max_steps=2).train()
    files, root = url_to_fs(address)
    files.pipe_file(f"{root}/{MARKER_NAME}", ODD_MARKERS[odd])
    move("two")
    make(address, max_steps=4).train(resume_from_checkpoint=True)
    assert names_at(address) == ["checkpoint-2", "checkpoint-4"]


def test_manifests_with_names_outside_of_the_folder_are_refused(address: str, move: Move) -> None:
    make(address).train()
    files, root = url_to_fs(address)
    folder = Path(local_folder(address))
    write_manifest(folder, {"../../outside": FileRecord(1, 1)})
    files.pipe_file(f"{root}/checkpoint-6/{MANIFEST_NAME}", (folder / MANIFEST_NAME).read_bytes())
    move("two")
    assert newest_of(local_folder(address)) == "checkpoint-4"


def test_checkpoints_deleted_at_the_url_are_not_resumed(address: str, caplog: pytest.LogCaptureFixture) -> None:
    make(address).train()
    files, root = url_to_fs(address)
    files.rm(f"{root}/checkpoint-6", recursive=True)
    folder = Path(local_folder(address))
    assert get_last_checkpoint(address) == str(folder / "checkpoint-4")
    assert (folder / "checkpoint-6").is_dir(), "a question deletes nothing"
    make(address, max_steps=5, save_strategy="no").train(resume_from_checkpoint=True)
    assert not (folder / "checkpoint-6").exists()
    files.rm(root, recursive=True)
    make(address, max_steps=5, save_strategy="no").train(resume_from_checkpoint="auto")
    # The last checkpoint is renamed, since the URL may have been emptied by mistake.
    assert (folder / ".deleted-checkpoint-4" / "model.safetensors").is_file()
    assert names_at(address, "littrainer_*.json"), "uploaded without checkpoints too"


def test_an_unusable_url_is_refused_before_training(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ImportError, match="output_dir='s3://bucket/run' cannot be used: Install s3fs"):
        make("s3://bucket/run")
    for wrong, words in {
        "s4://bucket/run": "Protocol not known: s4",
        "s3://": "no address",
        "gs://a/../b": "no address",
        Path("s3://bucket/run"): "give it as text, not as a Path",
    }.items():
        with pytest.raises(ValueError, match=words):
            make(wrong)
    with pytest.raises(ValueError, match=r"save_on_each_node=True.*Leave"):
        make(address, save_on_each_node=True)
    assert os.listdir(tmp_path) == []

    # Object stores do not create buckets.
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "async_impl", True)
    for error in (PermissionError("Access Denied"), FileNotFoundError("bucket does not exist")):
        monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", mock.Mock(side_effect=error))
        trainer = make(address, save_strategy="no")
        with pytest.raises(RemoteFolderError, match=f"{address}/{MARKER_NAME} could not be written .*{error}"):
            trainer.train()
        assert trainer.state.global_step == 0


@pytest.mark.parametrize("address", ["s3://bucket/a/run", "memory://run", "file:///a/b", "hf://user/repo"])
def test_a_local_folder_and_its_url_map_to_each_other(
    address: str, move: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda protocol: None)
    folder = local_folder(f"{address}/")
    assert folder.startswith(str(move("one"))) and get_remote_url(folder) == address
    assert get_remote_url(f"{folder}/checkpoint-2") == f"{address}/checkpoint-2"
    assert local_folder("out/run") == "out/run" and get_remote_url("out/run") is None


def test_an_error_is_logged_before_the_upload_and_raised_after_it(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(self: RemoteRun) -> None:
        assert "before ValueError: row 3 is damaged ends this run" in caplog.text
        raise FileNotFoundError("the local folder is gone")

    monkeypatch.setattr(RemoteRun, "finish", finish)
    with pytest.raises(ValueError, match="row 3"), Store(Path(local_folder(address))).upload(0):
        raise ValueError("row 3 is damaged")
    assert "the local folder is gone" in caplog.text


def write_checkpoint(folder: Path, step: int, text: str) -> None:
    """Write a checkpoint with a text."""
    (folder := folder / f"checkpoint-{step}").mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (folder / "notes.bin").write_text(text)
    write_manifest(folder, sequence=step)


@contextlib.contextmanager
def run_at(address: str, **written: str) -> Iterator[RemoteRun]:
    """Upload checkpoints, as by a resumed training, and finish uploads after the block."""
    store = Store(Path(local_folder(address)))
    with store.upload(0) as run:
        assert run is not None
        run.earlier.clear()
        for name, text in written.items():
            write_checkpoint(run.folder, int(name[1:]), text)
        run.finish()
        yield run
        store.finish_uploads()


def text_at(address: str, name: str) -> str:
    files, root = url_to_fs(address)
    return str(files.cat_file(f"{root}/{name}").decode())


def test_names_with_glob_characters_delete_nothing_else(address: str, move: Move) -> None:
    for pattern in (f"{address}*", f"{address}-[lr=1]", "file:///x/run?1"):
        with pytest.raises(ValueError, match="no address of a folder, without"):
            local_folder(pattern)
    with pytest.raises(RemoteFolderError, match="taken for a pattern"):
        RemoteFolder(f"{address}/lr=[1]")
    with run_at(address, s2="x"):
        RemoteFolder(address).delete("checkpoint-2/*")
    assert names_at(address) == ["checkpoint-2"]


def test_clearing_the_cache_deletes_nothing_at_the_url(address: str) -> None:
    with run_at(address, s2="a", s4="b", s6="c") as run:
        for name in run.local_checkpoints():
            shutil.rmtree(run.folder / name)
        write_checkpoint(run.folder, 8, "d")
    assert names_at(address) == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"]


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_damaged_checkpoint_is_not_uploaded(
    address: str, memory: Callable[[str, Hook], None], caplog: pytest.LogCaptureFixture, when: str
) -> None:
    with run_at(address, s2="whole") as run:
        damaged = run.folder / "checkpoint-4" / "notes.bin"
        memory("put_file", lambda path: damaged.write_text("") if "checkpoint-4" in path and when == "during" else 0)
        write_checkpoint(run.folder, 4, "text")
        if when == "before":
            damaged.write_text("")
    assert names_at(address) == ["checkpoint-2"]
    assert any("checkpoint-4 is damaged, and not uploaded" in text and "notes.bin" in text for text in caplog.messages)


def test_a_checkpoint_whose_remote_manifest_was_deleted_is_uploaded_again(address: str) -> None:
    with run_at(address, s2="a", s4="b"):
        pass
    files, root = url_to_fs(address)
    files.rm_file(f"{root}/checkpoint-2/{MANIFEST_NAME}")
    with run_at(address):
        pass
    assert names_at(address) == ["checkpoint-2", "checkpoint-4"]


def test_a_suspended_run_overwrites_nothing_of_the_run_that_took_over(
    address: str, move: Move, memory: Callable[[str, Hook], None], caplog: pytest.LogCaptureFixture
) -> None:
    written: list[str] = []

    def take_over(path: str) -> None:
        written.append(path)
        if len(written) == 1:
            move("two")
            RemoteRun(Path(local_folder(address))).claim()
            move("one")

    memory("put_file", take_over)
    with pytest.raises(RemoteFolderError, match=f"{MARKER_NAME} says that another run"), run_at(address, s2="a"):
        pass
    assert len(written) == 1 and "is taken over from process" in caplog.text


def test_a_run_does_not_upload_files_of_a_nested_run(address: str, move: Move) -> None:
    inner = f"{address}/seed1"
    with run_at(inner, s2="a"):
        (Path(local_folder(inner)) / "notes.txt").write_text("older")
    move("two")
    with run_at(inner):
        (Path(local_folder(inner)) / "notes.txt").write_text("newer")
    move("one")
    (Path(local_folder(address)) / "outer.txt").write_text("outer")
    remote.upload_files(local_folder(address))
    assert text_at(inner, "notes.txt") == "newer" and text_at(address, "outer.txt") == "outer"


def test_a_copied_folder_is_a_separate_run(address: str) -> None:
    with run_at(address, s2="a", s4="b") as run:
        (run.folder / "notes.txt").write_text("mine")
    copy = Path(local_folder(f"{address}-fork"))
    shutil.copytree(run.folder, copy)
    with run_at(f"{address}-fork") as fork:
        assert fork.local_checkpoints() == ["checkpoint-4", "checkpoint-2"]
    assert names_at(f"{address}-fork") == ["checkpoint-2", "checkpoint-4"]
    assert text_at(f"{address}-fork", "notes.txt") == "mine"


def test_a_killed_download_is_repeated(address: str, move: Move) -> None:
    with run_at(address, s2="a"):
        pass
    move("two")
    staging = Path(local_folder(address)) / STAGING_DIR / f"checkpoint-2{RANK_SUFFIX}{os.getpid()}"
    staging.mkdir(parents=True)
    assert newest_of(address) == "checkpoint-2" and not staging.exists()


def test_an_unwritable_cache_is_an_error_that_names_it(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(OSError, match="Set XDG_CACHE_HOME"):
        get_last_checkpoint(address)
    assert main(["report", address]) == 2
    assert "Set XDG_CACHE_HOME" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 600 + "a"])
def test_names_too_long_for_a_file_are_skipped(address: str, move: Move, tmp_path: Path, name: str) -> None:
    with run_at(address, s2="a"):
        pass
    write_manifest(tmp_path, {name: FileRecord(1, 1)})
    files, root = url_to_fs(address)
    files.put_file(str(tmp_path / MANIFEST_NAME), f"{root}/checkpoint-9/{MANIFEST_NAME}")
    move("two")
    assert newest_of(address) == "checkpoint-2"


def test_each_url_of_a_host_is_opened_with_the_right_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteFolder, "credentials", {})
    opened: list[str] = []

    def open_address(address: str) -> Any:
        opened.append(address)
        raise OSError(f"refused {address}")

    monkeypatch.setattr("fsspec.core.url_to_fs", open_address)
    for url in ("smb://u1:p1@h/a/checkpoint-2", "smb://u2:p2@h/b/", "s3://bucket/run?1"):
        strip_credentials(url)
    for address in ("smb://h/a", "smb://h/b/run", "smb://h/c", "s3://bucket/run"):
        with pytest.raises(RemoteFolderError) as error:
            RemoteFolder(address)
        text = "".join(traceback.format_exception(error.value))
        assert "p1" not in text and "p2" not in text
    assert opened == ["smb://u1:p1@h/a", "smb://u2:p2@h/b/run", "smb://h/c", "s3://bucket/run?1"]
    assert strip_credentials("file:///x/run?1") == "file:///x/run?1"


def test_a_manifest_that_cannot_be_emptied_is_an_error(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RemoteFolder(address)
    files.write("a", b"text")
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", lambda *_, **__: None)
    with pytest.raises(RemoteFolderError, match="has 4 bytes after 0 were written"):
        files.write("a", b"")


def test_a_failed_remote_deletion_is_retried(
    address: str, memory: Callable[[str, Hook], None], caplog: pytest.LogCaptureFixture
) -> None:
    refused = ["checkpoint-2"]
    memory("rm", lambda path: deny(path) if refused and path.endswith(refused[0]) else 0)
    with run_at(address, s2="a", s4="b") as run:
        assert not run.should_defer_deletion(str(run.folder / "checkpoint-2"))
        shutil.rmtree(run.folder / "checkpoint-2")
        run.finish()
        assert any("DeleteObject" in text and "retried" in text for text in caplog.messages)
        refused.clear()
    assert names_at(address, "checkpoint-*") == ["checkpoint-4"]


def test_a_full_disk_at_the_end_does_not_replace_the_error_of_the_training(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="row 3"), run_at(address):
        monkeypatch.setattr(remote, "write_atomically", mock.Mock(side_effect=OSError(28, "No space left on device")))
        raise ValueError("row 3 is damaged")


def test_a_check_writes_nothing_to_the_url(address: str, move: Move) -> None:
    report = make(f"{address}/deep/run").check()
    assert any(finding.about == "resume" for finding in report.findings)
    assert not url_to_fs(address)[0].find(address) and not [*move("one").rglob(".littrainer_check*")]
