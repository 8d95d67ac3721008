"""One of two processes that train together: `python -m tests.plain_lightning.two_processes FOLDER`.

Rank and world size come from the environment. Each process writes its curves to `FOLDER/RANK.pickle`.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.plain_lightning.curves import JOBS, curve_of_lightning, curve_of_our_trainer, data_module, plain_loaders
from tests.scenarios.models import tiny_gpt2

# Of three micro-batches in each process, so that the last window has one.
ACCUMULATION = 2


def main(folder: Path) -> None:
    rank, processes = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    job = JOBS["language model"]
    # Lightning deals single rows out to the processes and a Trainer batches: an optimizer step has the same rows all in
    # all, where their number divides evenly and dropout draws nothing for any of them.
    even = replace(job, rows=24, model=partial(tiny_gpt2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    in_order = {"train_sampling_strategy": "sequential"}
    # Ours first: when Lightning is done it deletes WORLD_SIZE from the environment.
    found = {
        "ours": curve_of_our_trainer(folder / "run", job, ACCUMULATION),
        "ours, in order": curve_of_our_trainer(folder / "run", even, ACCUMULATION, **in_order),
        "lightning": curve_of_lightning(job, ACCUMULATION, data_module, processes),
        "plain loaders": curve_of_lightning(even, ACCUMULATION, plain_loaders, processes),
    }
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
