"""Runs whose output_dir is an address; what becomes of them on a file system that lies is in tests/faults."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from littrainer import Trainer, TrainerCallback, get_last_checkpoint
from littrainer.checkpoint import remote
from littrainer.checkpoint.checksums import MANIFEST_NAME, FileRecord, write_manifest
from littrainer.checkpoint.remote import MARKER_NAME, RemoteRun
from littrainer.cli import main
from littrainer.errors.remote_folder import RemoteFolder, RemoteFolderError, address_of, local_folder
from tests.scenarios.trainers import quiet_trainer

Move = Callable[[str], Path]


@pytest.fixture
def move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Move:
    """Go on a machine with this name, which has a disk of its own; the first is called "one"."""

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
    """Names below an address; by default of the checkpoints that are complete."""
    files, root = fsspec.url_to_fs(address)
    files.invalidate_cache()
    return sorted(
        path.removeprefix(f"{root}/").removesuffix(f"/{MANIFEST_NAME}")
        for path, found in files.glob(f"{root}/{pattern}", detail=True).items()
        if found["size"] or found["type"] == "directory"
    )


class At(TrainerCallback):
    """Calls a function at the beginning of a step, or when it is saved."""

    def __init__(self, step: int, do: Callable[[], object], on_save: bool = False) -> None:
        self.step, self.do, self.on_save_too = step, do, on_save

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step and not self.on_save_too:
            self.do()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step and self.on_save_too:
            self.do()


def wait_for_uploads(trainer: Trainer) -> None:
    """Return when what was begun has ended."""
    work = remote._uploaded[Path(trainer.args.output_dir).resolve()]._work
    assert work is not None
    work.join(60)


def stop() -> None:
    raise InterruptedError("the machine is taken away")


def test_a_run_goes_on_exactly_on_a_machine_with_an_empty_disk(tmp_path: Path, move: Move) -> None:
    kept = {"save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    whole = make(str(tmp_path / "whole"), **kept)
    whole.train()
    # The folders of this one have to be made.
    address = f"file://{tmp_path}/there/run"
    first = make(address, **kept)
    first.add_callback(At(4, stop))
    with pytest.raises(InterruptedError):
        first.train()
    assert names_at(address) == ["checkpoint-2", "checkpoint-4"]
    move("two")
    second = make(address, **kept)
    second.train(resume_from_checkpoint=True)
    assert names_at(address) == ["checkpoint-4", "checkpoint-6"]
    # The one that the first machine deleted would be at the address still, were it not counted on the second.
    assert names_at(address, "checkpoint-2*") == []
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])
    assert second.state.best_model_checkpoint == os.path.join(second.args.output_dir, "checkpoint-6")


def test_the_best_model_is_downloaded_too(address: str, move: Move) -> None:
    kept: dict[str, Any] = {"save_total_limit": 2, "load_best_model_at_end": True, "metric_for_best_model": "score"}
    scores = iter([3.0, 1.0, 2.0])

    def score(_: Any) -> dict[str, float]:
        return {"score": next(scores)}

    def run(**changes: Any) -> Trainer:
        given = {"compute_metrics": score}
        return make(
            address, given=given, eval_strategy="steps", eval_steps=2, greater_is_better=True, **kept, **changes
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


def test_what_is_saved_after_training_is_uploaded_and_a_report_shows_it(
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


def test_a_checkpoint_is_resumed_by_its_address_and_one_that_is_not_there_is_refused(address: str, move: Move) -> None:
    make(address).train()
    move("two")
    trainer = make(f"{address}-next", max_steps=8)
    trainer.train(resume_from_checkpoint=f"{address}/checkpoint-4")
    assert trainer.state.global_step == 8 and names_at(f"{address}-next") == ["checkpoint-6", "checkpoint-8"]
    with pytest.raises(ValueError, match=f"valid checkpoint at {address}/checkpoint-9: there is no such folder"):
        trainer.train(resume_from_checkpoint=f"{address}/checkpoint-9")
    with pytest.raises(ValueError, match=rf"output directory \({address}-none\)"):
        make(f"{address}-none").train(resume_from_checkpoint=True)


def test_a_failed_upload_is_told_tried_at_the_next_save_and_an_error_at_the_end(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original, refused = RemoteFolder.write, {"checkpoint-2/optimizer.pt", "checkpoint-6/model.safetensors"}

    def write(self: RemoteFolder, name: str, content: Any) -> None:
        if name in refused:
            raise RemoteFolderError(f"{self.address}/{name} could not be written (no network).")
        original(self, name, content)

    monkeypatch.setattr(RemoteFolder, "write", write)
    trainer = make(address, save_total_limit=1)

    def mend() -> None:
        wait_for_uploads(trainer)
        refused.discard("checkpoint-2/optimizer.pt")

    trainer.add_callback(At(3, mend))
    # The newest one is uploaded first, and an upload that fails ends the round.
    trainer.add_callback(At(5, lambda: wait_for_uploads(trainer)))
    with pytest.raises(RemoteFolderError, match=f"{address}/checkpoint-6/model.safetensors.*{trainer.args.output_dir}"):
        trainer.train()
    (told,) = [text for text in caplog.messages if "the next save" in text and "checkpoint-2" in text]
    assert "no network" in told
    assert names_at(address) == ["checkpoint-4"], "nothing older is deleted before the newest one is safe"
    assert os.path.isdir(os.path.join(trainer.args.output_dir, "checkpoint-6"))

    refused.clear()
    make(address, max_steps=7).train(resume_from_checkpoint=True)
    assert names_at(address) == ["checkpoint-4", "checkpoint-6", "checkpoint-7"]


def test_no_checkpoint_is_deleted_here_before_a_newer_one_is_safe(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, refused = RemoteFolder.write, ["checkpoint-4/", "checkpoint-6/"]

    def write(self: RemoteFolder, name: str, content: Any) -> None:
        if name.startswith(tuple(refused)):
            raise RemoteFolderError(f"{self.address}/{name} could not be written (no network).")
        original(self, name, content)

    monkeypatch.setattr(RemoteFolder, "write", write)
    trainer = make(address, max_steps=8, save_total_limit=1)
    found: list[list[str]] = []

    def look() -> None:
        wait_for_uploads(trainer)
        found.append(sorted(name for name in os.listdir(trainer.args.output_dir) if name.startswith("checkpoint")))

    for step, then in {3: list, 5: list, 7: refused.clear}.items():
        trainer.add_callback(At(step, look))
        trainer.add_callback(At(step, then))
    trainer.train()
    assert found == [["checkpoint-2"], ["checkpoint-4"], ["checkpoint-4", "checkpoint-6"]]
    assert names_at(address) == ["checkpoint-8"] and not os.path.exists(f"{trainer.args.output_dir}/checkpoint-4")


def test_one_that_is_safe_at_the_address_alone_lets_older_ones_be_deleted_here(address: str) -> None:
    make(address).train()
    run = RemoteRun(Path(local_folder(address)))
    run.claim()
    shutil.rmtree(run.folder / "checkpoint-4")
    # As if their uploads had failed.
    del run.manifests["checkpoint-2"], run.manifests["checkpoint-6"]
    assert [step for step in (2, 6) if run.keeps(str(run.folder / f"checkpoint-{step}"))] == [6]


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
def test_what_has_no_manifest_is_resumed_named_and_never_deleted(
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


def test_a_checkpoint_on_its_way_is_not_deleted(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, begun, go_on = RemoteFolder.write, threading.Event(), threading.Event()

    def write(self: RemoteFolder, name: str, content: Any) -> None:
        if name == "checkpoint-2/optimizer.pt":
            begun.set()
            assert go_on.wait(60)
        original(self, name, content)

    monkeypatch.setattr(RemoteFolder, "write", write)
    trainer = make(address, save_total_limit=1)
    found: list[list[str]] = []

    def look() -> None:
        found.append(sorted(name for name in os.listdir(trainer.args.output_dir) if name.startswith("checkpoint")))
        go_on.set()

    trainer.add_callback(At(2, lambda: begun.wait(60)))
    trainer.add_callback(At(5, look))
    trainer.train()
    assert found == [["checkpoint-2", "checkpoint-4"]]
    assert names_at(address) == ["checkpoint-6"] and not os.path.exists(f"{trainer.args.output_dir}/checkpoint-2")


def test_thinned_checkpoints_are_thinned_at_the_address(address: str) -> None:
    make(address, keep_optimizer_states=1).train()
    assert names_at(address, "checkpoint-*/optimizer.pt") == ["checkpoint-6/optimizer.pt"]
    assert names_at(address) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_run_that_another_one_takes_over_from_ends_with_an_error_that_names_the_marker(
    address: str, move: Move, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(address)

    def begin_another() -> None:
        wait_for_uploads(trainer)
        move("two")
        RemoteRun(Path(local_folder(address))).claim()
        move("one")

    trainer.add_callback(At(5, begin_another))
    with pytest.raises(RemoteFolderError, match=f"{address}/{MARKER_NAME} says that another run"):
        trainer.train()
    assert names_at(address) == ["checkpoint-2", "checkpoint-4"]
    assert any("is taken over from process" in text for text in caplog.messages)


def test_a_torn_object_makes_an_older_checkpoint_the_newest(
    address: str, move: Move, caplog: pytest.LogCaptureFixture
) -> None:
    make(address).train()
    files, root = fsspec.url_to_fs(address)
    files.pipe_file(f"{root}/checkpoint-6/optimizer.pt", b"torn")
    manifest = files.cat_file(f"{root}/checkpoint-4/{MANIFEST_NAME}")
    files.pipe_file(f"{root}/checkpoint-4/{MANIFEST_NAME}", manifest[:-9])
    move("two")
    newest = get_last_checkpoint(local_folder(address))
    assert newest is not None and newest.endswith("checkpoint-2")
    assert any(
        f"{address}/checkpoint-6, which is damaged: optimizer.pt has 4 bytes" in text for text in caplog.messages
    )
    assert any(f"{address}/checkpoint-4 does not count" in text for text in caplog.messages)
    # The copies from which these were uploaded are whole.
    move("one")
    newest = get_last_checkpoint(local_folder(address))
    assert newest is not None and newest.endswith("checkpoint-6")


def test_names_in_a_manifest_lead_nowhere_else(address: str, move: Move) -> None:
    make(address).train()
    files, root = fsspec.url_to_fs(address)
    folder = Path(local_folder(address))
    write_manifest(folder, {"../../outside": FileRecord(1, 1)})
    files.pipe_file(f"{root}/checkpoint-6/{MANIFEST_NAME}", (folder / MANIFEST_NAME).read_bytes())
    move("two")
    newest = get_last_checkpoint(local_folder(address))
    assert newest is not None and newest.endswith("checkpoint-4")


def test_what_was_deleted_at_the_address_is_not_resumed(address: str, caplog: pytest.LogCaptureFixture) -> None:
    make(address).train()
    files, root = fsspec.url_to_fs(address)
    files.rm(f"{root}/checkpoint-6", recursive=True)
    folder = Path(local_folder(address))
    assert get_last_checkpoint(address) == str(folder / "checkpoint-4")
    assert (folder / "checkpoint-6").is_dir(), "a question deletes nothing"
    make(address, max_steps=5, save_strategy="no").train(resume_from_checkpoint=True)
    assert not (folder / "checkpoint-6").exists()
    files.rm(root, recursive=True)
    make(address, max_steps=5, save_strategy="no").train(resume_from_checkpoint="auto")
    # Nothing is left at the address, perhaps not on purpose.
    assert (folder / ".deleted-checkpoint-4" / "model.safetensors").is_file()
    assert names_at(address, "littrainer_*.json"), "uploaded without checkpoints too"


def test_an_address_that_cannot_be_used_is_refused_before_training(
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

    # An object store makes no bucket by itself.
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "async_impl", True)
    for error in (PermissionError("Access Denied"), FileNotFoundError("bucket does not exist")):
        monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", mock.Mock(side_effect=error))
        trainer = make(address, save_strategy="no")
        with pytest.raises(RemoteFolderError, match=f"{address}/{MARKER_NAME} could not be written .*{error}"):
            trainer.train()
        assert trainer.state.global_step == 0


@pytest.mark.parametrize("address", ["s3://bucket/a/run", "memory://run", "file:///a/b", "hf://user/repo"])
def test_a_local_folder_and_its_address_stand_for_each_other(
    address: str, move: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda protocol: None)
    folder = local_folder(f"{address}/")
    assert folder.startswith(str(move("one"))) and address_of(folder) == address
    assert address_of(f"{folder}/checkpoint-2") == f"{address}/checkpoint-2"
    assert local_folder("out/run") == "out/run" and address_of("out/run") is None
