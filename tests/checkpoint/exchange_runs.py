"""Trainings whose checkpoints are exchanged: `python -m tests.checkpoint.exchange_runs OUT CHECKPOINTS`.

With transformers 5.3.0 on the path, trains each kind of model into OUT, and resumes the checkpoints in CHECKPOINTS.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.scenarios.data import Rows, tag_rows, tiny_tokenizer, vector_rows
from tests.scenarios.models import NoisyClassifier, tiny_bert_tagger, tiny_gpt2, tiny_lora_tagger
from tests.scenarios.once_per_process import leave_out_of_collections

STEPS = 5
BREAK = 3


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Parameters:
        build: makes the model.
        rows: makes a number of rows.
        max_shard_size: shards the weights, if set.
    """

    build: Callable[[], Any]
    rows: Callable[[int], Any] = tag_rows
    max_shard_size: str | None = None


def language_labels(count: int) -> list[Any]:
    return [{**row, "labels": row["input_ids"]} for row in tag_rows(count)]


KINDS = {
    "plain module": Kind(NoisyClassifier, vector_rows),
    "tied embeddings": Kind(tiny_gpt2, language_labels),
    "layer norms": Kind(tiny_bert_tagger),
    "adapter": Kind(tiny_lora_tagger),
    "shards": Kind(tiny_gpt2, language_labels, "5KB"),
}

Result = dict[str, Any]


def train(library: Any, kind: Kind, folder: Path, resume: Path | None = None) -> Result:
    """Train with dropout, warm-up and a checkpoint at step `BREAK`; return logs and final weights."""

    class SmallFiles(library.Trainer):  # type: ignore[misc]
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            if kind.max_shard_size is not None:
                self.model.save_pretrained(output_dir, max_shard_size=kind.max_shard_size)
                (Path(output_dir) / "model.safetensors").unlink()

    args = library.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        warmup_steps=2,
        logging_steps=1,
        save_strategy="steps",
        save_steps=BREAK,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    torch.manual_seed(0)
    rows = Rows(kind.rows(16))
    collator = None if kind.rows is vector_rows else library.DataCollatorForTokenClassification(tiny_tokenizer())
    trainer = SmallFiles(model=kind.build(), args=args, data_collator=collator, train_dataset=rows)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    logs = [
        {name: log[name] for name in ("step", "loss", "grad_norm", "learning_rate")}
        for log in trainer.state.log_history
        if "loss" in log
    ]
    return {"logs": logs, "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()}}


def checkpoint(folder: Path, name: str) -> Path:
    return folder / name / f"checkpoint-{BREAK}"


def main(out: Path, checkpoints: Path) -> None:
    torch.set_num_threads(1)
    library = importlib.import_module("transformers")
    _ = library.Trainer
    leave_out_of_collections()
    for name, kind in KINDS.items():
        torch.save(train(library, kind, out / name), out / f"{name}.whole.pt")
        resumed = train(library, kind, out / f"{name} resumed", checkpoint(checkpoints, name))
        torch.save(resumed, out / f"{name}.resumed.pt")
    (out / "version").write_text(library.__version__)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
