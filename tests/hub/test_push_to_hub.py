"""Uploads in the background, their order and retries, and the files of their snapshots."""

from __future__ import annotations

import _thread
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from littrainer.checkpoint import store
from littrainer.hub.push_to_hub import (
    EXCLUDED_FILES,
    MAX_COPIED_BYTES,
    RESUME_ONLY_FILES,
    SNAPSHOT_DIR,
    PushInProgress,
    Upload,
    copy_files,
    create_snapshot,
    remove_abandoned_snapshots,
)
from tests.hub.runs import files_below
from tests.scenarios.other_processes import MAX_WAIT_SECONDS


class Sending(Upload):
    """An upload that records its message and raises `error`."""

    sent: ClassVar[list[str]] = []
    error: ClassVar[Exception | None] = None

    def send(self) -> Any:
        Sending.sent.append(str(self.message))
        if Sending.error is not None:
            raise Sending.error


@pytest.fixture
def sending(monkeypatch: pytest.MonkeyPatch) -> type[Sending]:
    monkeypatch.setattr(Sending, "sent", [])
    monkeypatch.setattr(Sending, "error", None)
    return Sending


def make_uploads(run: Path, step: int) -> list[Upload]:
    """Return the uploads of a model and its checkpoint."""
    with create_snapshot(run, f"checkpoint-{step}") as folder:
        return [
            Sending("someone/run", folder / "model", f"model {step}"),
            Sending("someone/run", folder / "all", f"checkpoint {step}"),
        ]


def list_snapshots(run: Path) -> list[str]:
    return sorted(folder.name.rpartition("-")[0] for folder in (run / SNAPSHOT_DIR).glob("*"))


def names(*steps: int) -> list[str]:
    return [f"checkpoint-{step}" for step in steps]


def test_a_push_that_failed_is_replaced_by_the_next_and_retried_once_at_the_end(
    sending: type[Sending], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sending.error = OSError("no way to the Hub")
    pushes = PushInProgress()
    for step in (1, 2):
        pushes.begin(make_uploads(tmp_path, step))
        pushes.wait_until_done()
        assert list_snapshots(tmp_path) == names(step)
    assert sending.sent == ["model 1", "model 2"]
    pushes.finish()
    assert '"model 2"' in str(pushes.failure_at_end)
    assert caplog.records[-1].getMessage().startswith(f"{pushes.failure_at_end} The last save is in output_dir")
    sending.error = None
    sending.sent.clear()
    pushes.begin(make_uploads(tmp_path, 3))
    pushes.finish()
    assert sending.sent == ["model 3", "checkpoint 3"]
    assert list_snapshots(tmp_path) == [] and pushes.failure_at_end is None


def test_an_earlier_save_that_is_sent_again_does_not_hide_that_the_last_could_not_be_prepared(
    sending: type[Sending], tmp_path: Path
) -> None:
    sending.error = OSError("no way to the Hub")
    pushes = PushInProgress()
    pushes.begin(make_uploads(tmp_path, 1))
    pushes.wait_until_done()
    sending.error = None
    pushes.begin([], "no space left on the disk")
    pushes.finish()
    assert "no space left on the disk" in str(pushes.failure_at_end) and list_snapshots(tmp_path) == []


def test_the_text_of_an_upload_has_no_access_token(tmp_path: Path) -> None:
    upload = Upload("someone/run", tmp_path, None, token="hf_a_secret")
    assert "hf_a_secret" not in repr(upload)


def test_pushes_that_are_cancelled_leave_nothing_on_the_disk(sending: type[Sending], tmp_path: Path) -> None:
    pushes, may_end = PushInProgress(), threading.Event()
    pushes._submit(lambda _: may_end.wait(MAX_WAIT_SECONDS), [])
    pushes.begin(make_uploads(tmp_path, 1))
    assert list_snapshots(tmp_path) == names(1)
    pushes.cancel()
    assert list_snapshots(tmp_path) == []
    may_end.set()
    pushes.finish()
    assert sending.sent == []


def test_snapshots_of_a_killed_run_are_removed_and_snapshots_of_a_running_push_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with create_snapshot(tmp_path, "checkpoint-2") as snapshot:
        pass
    (tmp_path / SNAPSHOT_DIR / "checkpoint-1-0a1b").mkdir()
    remove_abandoned_snapshots(tmp_path)
    assert [entry.name for entry in (tmp_path / SNAPSHOT_DIR).iterdir()] == [snapshot.name]
    # Another process detects the lock.
    with monkeypatch.context() as patch:
        patch.setattr(store, "_locked_stores", {})
        remove_abandoned_snapshots(tmp_path)
    assert [entry.name for entry in (tmp_path / SNAPSHOT_DIR).iterdir()] == [snapshot.name]
    store._forget_locks_in_child()
    remove_abandoned_snapshots(tmp_path)
    assert not (tmp_path / SNAPSHOT_DIR).exists()


# ---- The thread ----


def test_an_interruption_ends_the_wait_and_reports_unfinished_pushes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    work, may_end = PushInProgress(), threading.Event()

    class Interrupting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # Ctrl-C after the message.
            if record.levelno == logging.WARNING:
                _thread.interrupt_main()

    handler = Interrupting()
    logger = logging.getLogger("littrainer.hub.push_to_hub")
    logger.addHandler(handler)
    try:
        first, second = (work._submit(lambda _: may_end.wait(MAX_WAIT_SECONDS), []) for _ in range(2))
        with pytest.raises(KeyboardInterrupt):
            work.finish_before_exit()
        assert not first.done() and second.cancelled()
    finally:
        logger.removeHandler(handler)
        may_end.set()
    assert "and the program ends without it" in caplog.text


# ---- Files of a push ----

MODEL = ("config.json", "model.safetensors", "training_args.bin", "tokenizer.json", "custom/code.py")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
TO_RESUME = ("trainer_state.json", "scheduler.pt", "littrainer_manifest.json", "README.md")

# Kind of checkpoint -> files that load the model, and files that only resuming needs.
CHECKPOINTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "of one process": (MODEL, (*TO_RESUME, "optimizer.pt", "scaler.pt", "rng_state.pth", "littrainer_resume.pt")),
    "of an adapter in two processes": (ADAPTER, (*TO_RESUME, "rng_state_0.pth", "littrainer_resume_1.pt")),
    "of FSDP in parts": (
        ("config.json", "training_args.bin"),
        (*TO_RESUME, "pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata", "optimizer_0/__1_0.distcp"),
    ),
    "of DeepSpeed's engine": (
        ("config.json", "model.safetensors"),
        (*TO_RESUME, "global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt", "latest", "zero_to_fp32.py"),
    ),
}


def write_files(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")
    return folder


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_the_model_is_what_loads_it_and_the_checkpoint_is_everything(tmp_path: Path, kind: str) -> None:
    loads, resumes = CHECKPOINTS[kind]
    checkpoint = write_files(tmp_path / "checkpoint-4", (*loads, *resumes))
    copy_files(checkpoint, tmp_path / "model", RESUME_ONLY_FILES)
    copy_files(checkpoint, tmp_path / "whole")
    everything = files_below(checkpoint)
    assert files_below(tmp_path / "model") == {name: everything[name] for name in loads}
    assert files_below(tmp_path / "whole") == everything


def test_a_large_file_of_a_checkpoint_is_linked_and_outlives_its_checkpoint(tmp_path: Path) -> None:
    checkpoint = write_files(tmp_path / "checkpoint-4", ("config.json",))
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.truncate(MAX_COPIED_BYTES + 1)
    copy_files(checkpoint, tmp_path / "model", RESUME_ONLY_FILES)
    assert (tmp_path / "model" / "model.safetensors").samefile(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    assert (tmp_path / "model" / "model.safetensors").stat().st_size == MAX_COPIED_BYTES + 1


def test_checkpoints_of_a_lightning_trainer_are_no_part_of_the_model(tmp_path: Path) -> None:
    checkpoint = ("model.safetensors", "lightning_state.pt", "tokenizer/vocab.json")
    run = write_files(tmp_path / "run", ("notes.txt", *(f"epoch=0-step=2.ckpt/{name}" for name in checkpoint)))
    write_files(run / ".littrainer_from-lightning-step-2", ("optimizer.pt", "model.safetensors"))
    copy_files(run, tmp_path / "taken", EXCLUDED_FILES)
    assert list(files_below(tmp_path / "taken")) == ["notes.txt"]


def test_a_large_file_outside_of_checkpoints_is_copied_since_it_may_be_modified(tmp_path: Path) -> None:
    with (write_files(tmp_path / "run", ("notes.txt",)) / "log.txt").open("wb") as file:
        file.truncate(MAX_COPIED_BYTES + 1)
    copy_files(tmp_path / "run", tmp_path / "linked", link=os.symlink)
    assert (tmp_path / "linked" / "log.txt").samefile(tmp_path / "run" / "log.txt")
    copy_files(tmp_path / "run", tmp_path / "taken", link=None)
    with (tmp_path / "run" / "log.txt").open("ab") as file:
        file.write(b"more")
    assert (tmp_path / "taken" / "log.txt").stat().st_size == MAX_COPIED_BYTES + 1
