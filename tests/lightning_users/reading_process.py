"""One of two processes that share data: `python -m tests.lightning_users.reading_process FOLDER`.

Rank and world size come from the environment. Each process writes what it was handed to `FOLDER/RANK.pickle`.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from tests.lightning_users.reading import (
    ARGUMENTS,
    CountingModule,
    Listener,
    Numbers,
    SavingOnce,
    StreamOfNumbers,
    collate_with_noise,
    fit,
    numbers_module,
)
from tests.scenarios.other_processes import end_process
from tests.scenarios.trainers import quiet_trainer

RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
# Three micro-batches of 4 in each process, the last of which is filled up.
ROWS = 22
# Behind the first window of the second epoch.
SAVED_AFTER = 5


def under_our_trainer(folder: Path, rows: Any, **arguments: Any) -> list[Any]:
    given = {"train_dataset": rows, "data_collator": collate_with_noise}
    changes = {**ARGUMENTS, "num_train_epochs": 2, "gradient_accumulation_steps": 2, "seed": 5, **arguments}
    trainer = quiet_trainer(folder, Listener(), given=given, **changes)
    trainer.train()
    return trainer.model.heard


def under_lightning(rows: Any, seed: int = 5, **keywords: Any) -> list[Any]:
    """Lightning is left to distribute samples, as it does by itself."""
    keywords = {"max_epochs": 2, **keywords, "accumulate_grad_batches": 2, "devices": PROCESSES}
    data = numbers_module(rows, collate_with_noise)
    return fit(CountingModule(), data, seed=seed, strategy=DDPStrategy(process_group_backend="gloo"), **keywords).heard


def main(folder: Path) -> None:
    endless = {"max_epochs": -1, "max_steps": 2}
    checkpoint = folder / "one.ckpt"
    # Ours first: when Lightning is done it deletes WORLD_SIZE from the environment.
    found: dict[str, Any] = {
        "ours": under_our_trainer(folder / "run", Numbers(ROWS)),
        "our stream": under_our_trainer(folder / "run", StreamOfNumbers(2 * ROWS), max_steps=2),
    }
    saving = SavingOnce(checkpoint, "on_train_batch_end", SAVED_AFTER)
    found["lightning"] = under_lightning(Numbers(ROWS), callbacks=[saving])
    found["stream"] = under_lightning(StreamOfNumbers(2 * ROWS), **endless)
    # Nobody has seeded these processes alike.
    found["resumed"] = under_lightning(Numbers(ROWS), seed=70 + RANK, checkpoint=checkpoint)
    found["unseeded"] = under_lightning(Numbers(ROWS), seed=70 + RANK, max_epochs=1)
    found["places"] = len(torch.load(checkpoint, weights_only=True)["TrainerDataModule"]["processes"])
    (folder / f"{RANK}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_process()
