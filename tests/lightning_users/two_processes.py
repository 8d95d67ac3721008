"""One of two processes that train together: `python -m tests.lightning_users.two_processes FOLDER`.

Rank and world size come from the environment. Each process writes its curves to `FOLDER/RANK.pickle`.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tests.lightning_users.curves import JOBS, Job, curve_of_lightning, curve_of_our_trainer, data_module
from tests.scenarios.collators import pad_tokens
from tests.scenarios.models import tiny_gpt2
from tests.scenarios.other_processes import end_process

# Of three micro-batches in each process, so that the last window has one.
ACCUMULATION = 2


RANK, PROCESSES = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def loaders_in_order(job: Job, args: dict[str, Any]) -> dict[str, Any]:
    """Loaders with a sampler, since one that Lightning puts in its place would shuffle."""

    def loader(rows: Any, batch_size: int) -> DataLoader[Any]:
        sampler = DistributedSampler(rows, num_replicas=PROCESSES, rank=RANK, shuffle=False)
        return DataLoader(rows, batch_size=batch_size, sampler=sampler, collate_fn=pad_tokens)

    return {
        "train_dataloaders": loader(job.training_rows, 4),
        "val_dataloaders": loader(job.evaluation_rows, 3),
    }


def main(folder: Path) -> None:
    job = JOBS["language model"]
    # This sampler deals single rows out to the processes, and a Trainer batches: an optimizer step has the same rows in
    # all, where their number divides evenly and dropout draws nothing for any of them. AdamW would enlarge rounding
    # where a gradient is nothing else.
    even = replace(job, rows=24, model=partial(tiny_gpt2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    sgd = {"optim": "sgd", "learning_rate": 0.5}
    in_order = {"train_sampling_strategy": "sequential"}
    # Ours first: when Lightning is done it deletes WORLD_SIZE from the environment.
    found = {
        "ours": curve_of_our_trainer(folder / "run", job, ACCUMULATION),
        "ours, in order": curve_of_our_trainer(folder / "run", even, ACCUMULATION, **in_order, **sgd),
        "lightning": curve_of_lightning(job, ACCUMULATION, data_module, PROCESSES),
        "plain loaders": curve_of_lightning(even, ACCUMULATION, loaders_in_order, PROCESSES, **sgd),
    }
    (folder / f"{RANK}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_process()
