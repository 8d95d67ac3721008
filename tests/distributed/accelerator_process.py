"""One of several processes that use an accelerator: `python -m tests.distributed.accelerator_process FOLDER`.

Each writes what it found to `FOLDER/RANK.pickle`, once for ours and once for accelerate's own Accelerator.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather, gather_object
from datasets import Dataset
from torch.utils.data import DataLoader, IterableDataset

from littrainer import TrainingArguments
from littrainer.compat.accelerator import AcceleratorFacade
from tests.scenarios.other_processes import end_process


def exchanged(accelerator: Any, rank: int) -> dict[str, Any]:
    """Values gathered, padded and reduced."""
    mine = torch.full((2, 2 + rank), float(rank))
    return {
        "gathered": accelerator.gather({"a": torch.full((2,), rank), "b": (torch.tensor(float(rank)),)}),
        "for metrics": accelerator.gather_for_metrics(torch.full((2, 1), rank)),
        "objects": accelerator.gather_for_metrics([f"row of {rank}"]),
        "padded": accelerator.pad_across_processes(mine, dim=1, pad_index=-100),
        "padded first": accelerator.pad_across_processes(mine, dim=1, pad_index=7, pad_first=True),
        "sum": accelerator.reduce(mine[:, 0]),
        "mean": accelerator.reduce([mine[:, 0]], reduction="mean", scale=2.0),
        "max": accelerator.reduce({"a": mine[:, 0]}, reduction="max"),
    }


def shares(accelerator: Any) -> list[Any]:
    """What `split_between_processes` gives this process."""
    found = []
    collections: list[Any] = [
        ["a", "b", "c"],
        torch.arange(3),
        {"x": [1, 2, 3], "y": torch.arange(3)},
        ["alone"],
        Dataset.from_dict({"x": [1, 2, 3]}),
        "text",
    ]
    for collection in collections:
        for padded in (False, True):
            # accelerate puts the share into the dict that it is given.
            given = dict(collection) if isinstance(collection, dict) else collection
            with accelerator.split_between_processes(given, apply_padding=padded) as share:
                found.append(share.to_dict() if isinstance(share, Dataset) else share)
    return found


def turns(accelerator: Any, folder: Path) -> list[Any]:
    """Who goes first, who prints, and which decorated functions run."""
    seen: list[Any] = []
    for name in ("main_process_first", "local_main_process_first"):
        with getattr(accelerator, name)():
            if accelerator.is_main_process:
                time.sleep(0.2)
                (folder / name).touch()
            seen.append((folder / name).exists())
    accelerator.wait_for_everyone()
    for decorate in (
        accelerator.on_main_process,
        accelerator.on_local_main_process,
        accelerator.on_last_process,
        accelerator.on_process(process_index=1),
        accelerator.on_local_process(local_process_index=1),
    ):
        seen.append(decorate(lambda: "ran")())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        accelerator.print("once")
    seen.append(printed.getvalue())
    return seen


def facts(accelerator: Any) -> list[Any]:
    names = "num_processes process_index local_process_index is_main_process is_last_process use_distributed"
    return [*(getattr(accelerator, name) for name in names.split()), str(accelerator.distributed_type)]


def data_parallel(accelerator: Any, rank: int) -> Any:
    """Gradients of a prepared model, exchanged and held back."""
    torch.manual_seed(0)
    model = accelerator.prepare(torch.nn.Linear(2, 1, bias=False))
    other = accelerator.prepare_model(torch.nn.Linear(2, 1, bias=False), evaluation_mode=True)
    x = torch.full((1, 2), float(rank + 1))
    with accelerator.no_sync(model):
        accelerator.backward(model(x).sum())
    held_back = accelerator.unwrap_model(model).weight.grad.clone()
    accelerator.backward(model(x).sum())
    return [
        type(model).__name__,
        type(other).__name__,
        held_back,
        accelerator.unwrap_model(model).weight.grad,
        sorted(accelerator.get_state_dict(model)),
    ]


def library_calls(rank: int) -> list[Any]:
    """What libraries call of accelerate itself, which acts on its global state."""
    objects = [f"from {rank}"]
    broadcast_object_list(objects)
    return [gather(torch.full((1,), rank)), gather_object([rank]), objects]


def loaders(accelerator: Any) -> list[Any]:
    """Batches of prepared loaders, what is gathered of them for metrics, and where the accelerator says one stands."""
    found: list[Any] = []
    state = accelerator.gradient_state
    datasets: list[Any] = [list(range(7)), list(range(8)), Numbers(7)]
    for dataset in datasets:
        loader = accelerator.prepare(DataLoader(dataset, batch_size=2))
        for batch in loader:
            gathered = accelerator.gather_for_metrics(batch)
            found.append([batch, gathered, state.in_dataloader, state.end_of_dataloader, state.remainder])
        found.append([len(loader) if isinstance(dataset, list) else None, state.in_dataloader])
        if isinstance(dataset, list):
            found.append([loader.total_batch_size, loader.total_dataset_length, loader.remainder])
    found.append(accelerator.gather_for_metrics(torch.ones(2)))
    return found


class Numbers(IterableDataset):
    """A stream of numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


def accumulating(accelerator: Any, rank: int) -> Any:
    """Gradients of an accumulation over two micro-batches, clipped by their norm over both processes."""
    torch.manual_seed(0)
    model = accelerator.prepare(torch.nn.Linear(2, 1, bias=False))
    inner = accelerator.unwrap_model(model)
    found: list[Any] = []
    accelerator.gradient_accumulation_steps = 2
    for number in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 2), float(rank + number))).sum())
            found.append([accelerator.sync_gradients, inner.weight.grad.clone()])
            if accelerator.sync_gradients:
                found.append([accelerator.clip_grad_norm_(model.parameters(), 0.5), inner.weight.grad.clone()])
                model.zero_grad()
    accelerator.gradient_accumulation_steps = 1
    return found


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    args = TrainingArguments(str(folder), use_cpu=True, report_to="none")
    accelerators = {"ours": AcceleratorFacade(args), "accelerate": Accelerator(cpu=True)}
    found: dict[str, Any] = {"calls": library_calls(rank), "state": args.distributed_state.num_processes}
    for name, accelerator in accelerators.items():
        own = folder / name
        own.mkdir(exist_ok=True)
        found[name] = {
            "exchanged": exchanged(accelerator, rank),
            "shares": shares(accelerator),
            "turns": turns(accelerator, own),
            "facts": facts(accelerator),
            "data parallel": data_parallel(accelerator, rank),
            "loaders": loaders(accelerator),
            "accumulating": accumulating(accelerator, rank),
        }
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    accelerators["ours"].end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    end_process()
