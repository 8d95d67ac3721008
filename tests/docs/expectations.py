"""Expected results of the code of a page, in addition to the output that the page shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Names = dict[str, Any]


def best_checkpoint_is_loaded(names: Names, folder: Path, printed: str) -> None:
    # Early stopping has ended the training before its tenth epoch.
    assert "best: runs/classifier/checkpoint-" in printed and not (folder / "runs/classifier/checkpoint-600").exists()
    assert list((folder / "runs/classifier").rglob("events.out.tfevents*"))
    assert (folder / "runs/classifier/report.html").is_file()


def scenario_is_recorded(names: Names, folder: Path, printed: str) -> None:
    from tests.fidelity.side import OURS, Side

    record = names["plain_module_saving_every_third_step"](Side(OURS, "automatic", folder))
    assert record.log_history and (folder / "out" / "checkpoint-3").is_dir()


def callbacks_are_called(names: Names, folder: Path, printed: str) -> None:
    names["trainer"].train()
    (metrics,) = (folder / "out").rglob("metrics.csv")
    columns = metrics.read_text().splitlines()[0]
    assert "lr-AdamW" in columns and "eval" in columns


def both_processes_are_started(names: Names, folder: Path, printed: str) -> None:
    assert sorted(re.findall(r"rank \d of 2", printed)) == ["rank 0 of 2", "rank 1 of 2"]
    assert (folder / "runs" / "first" / "report.html").is_file()


def folders_are_written_and_resumed(names: Names, folder: Path, printed: str) -> None:
    assert names["trainer"].global_step == 750
    folders = [path.parent for path in (folder / "lightning_logs").rglob("lightning_state.pt")]
    assert folders and all((path / "model.safetensors").is_file() for path in folders)
    assert all((path / "tokenizer.json").is_file() for path in folders)


def keras_model_learns_and_is_saved(names: Names, folder: Path, printed: str) -> None:
    assert names["metrics"]["eval_accuracy"] > 0.7
    assert {"model.safetensors", "model.keras"} < {path.name for path in (folder / "trained").iterdir()}


def metrics_are_printed(names: Names, folder: Path, printed: str) -> None:
    assert all(f"'eval_{name}'" in printed for name in ("loss", "accuracy", "f1_0", "f1_1", "f1_2", "exact"))
    assert set(names["compute_metrics"]) == {"next_token_accuracy", "perplexity", "class_accuracy"}
    assert re.search(r"^\(8, \d+\)$", printed, re.MULTILINE)


def repository_is_resumed_from(names: Names, folder: Path, printed: str) -> None:
    repository = names["hub_on_this_machine"].repositories["me/my-model"]
    assert "GLUE MRPC" in repository.files()["README.md"].decode()
    assert "End of training" in repository.messages(), repository.messages()
    assert (folder / "my-model" / "last-checkpoint" / "trainer_state.json").is_file()
    assert names["trainer"].state.global_step == 6


def checkpoints_are_exchanged(names: Names, folder: Path, printed: str) -> None:
    assert (folder / "step-4.ckpt").is_file()
    assert (folder / "exported" / "model.safetensors").is_file()
    assert (folder / "again" / "checkpoint-4" / "trainer_state.json").is_file()


def features_work(names: Names, folder: Path, printed: str) -> None:
    assert (folder / "runs" / "fit-profile.txt").is_file() and (folder / "learning_rates.png").is_file()
    losses = [entry["loss"] for entry in names["history"].state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] / 2


def searches_are_recorded(names: Names, folder: Path, printed: str) -> None:
    assert len(re.findall(r"\] Trial \d+ (?:finished|pruned)", printed)) == 12
    assert (folder / "out" / "report.html").is_file() and (folder / "out" / "run-3" / "report.html").is_file()
    assert names["best"].run_summary == "sweep7"


def has_tensor_plan(names: Names, folder: Path, printed: str) -> None:
    assert names["Network"]().tp_plan == {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def runs_are_written(names: Names, folder: Path, printed: str) -> None:
    from littrainer import Trainer

    data = {"train_dataset": names["train_dataset"]}
    Trainer(names["model"], names["args"], **data, callbacks=[names["TeamWandb"]()]).train()
    assert list((folder / "out").rglob("metrics.csv")) and list((folder / "out").rglob("events.out.tfevents*"))
    assert list(folder.rglob("offline-run-*"))


EXPECTATIONS: dict[str, Callable[[Names, Path, str], None]] = {
    "CONTRIBUTING.md": scenario_is_recorded,
    "docs/tutorial-classifier.md": best_checkpoint_is_loaded,
    "docs/callbacks.md": callbacks_are_called,
    "docs/checkpoint-exchange.md": folders_are_written_and_resumed,
    "docs/api/command-line.md": both_processes_are_started,
    "docs/compatibility.md": keras_model_learns_and_is_saved,
    "docs/evaluation.md": metrics_are_printed,
    "docs/hub.md": repository_is_resumed_from,
    "docs/lightning.md": checkpoints_are_exchanged,
    "docs/lightning-features.md": features_work,
    "docs/tensor-parallelism.md": has_tensor_plan,
    "docs/search.md": searches_are_recorded,
    "docs/tracking.md": runs_are_written,
}
"""page -> given the names that its code has left, its folder, and what it printed."""
