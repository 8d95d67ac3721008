"""The accelerator of a Trainer in two processes: collectives, shares, turns, loaders and gradients."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from torch.utils.data import DataLoader

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.data import Stream


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
    """Return this process's part from `split_between_processes`."""
    results = []
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
            trainer_kwargs = dict(collection) if isinstance(collection, dict) else collection
            with accelerator.split_between_processes(trainer_kwargs, apply_padding=padded) as share:
                results.append(share.to_dict() if isinstance(share, Dataset) else share)
    return results


def turns(accelerator: Any) -> list[Any]:
    """Who goes first, who prints, and which decorated functions run."""
    records: list[Any] = []
    for name in ("main_process_first", "local_main_process_first"):
        with getattr(accelerator, name)():
            if accelerator.is_main_process:
                time.sleep(0.2)
                Path(name).touch()
            records.append(Path(name).exists())
    accelerator.wait_for_everyone()
    for decorate in (
        accelerator.on_main_process,
        accelerator.on_local_main_process,
        accelerator.on_last_process,
        accelerator.on_process(process_index=1),
        accelerator.on_local_process(local_process_index=1),
    ):
        records.append(decorate(lambda: "ran")())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        accelerator.print("once")
    records.append(printed.getvalue())
    return records


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


def loaders(accelerator: Any) -> list[Any]:
    """Batches of prepared loaders, their gathered metrics, and the accelerator's position in them."""
    results: list[Any] = []
    state = accelerator.gradient_state
    datasets: list[Any] = [list(range(7)), list(range(8)), Stream([{"number": number} for number in range(7)])]
    for dataset in datasets:
        loader = accelerator.prepare(DataLoader(dataset, batch_size=2))
        for batch in loader:
            gathered = accelerator.gather_for_metrics(batch)
            results.append([batch, gathered, state.in_dataloader, state.end_of_dataloader, state.remainder])
        results.append([len(loader) if isinstance(dataset, list) else None, state.in_dataloader])
        if isinstance(dataset, list):
            results.append([loader.total_batch_size, loader.total_dataset_length, loader.remainder])
    results.append(accelerator.gather_for_metrics(torch.ones(2)))
    return results


def accumulating(accelerator: Any, rank: int) -> Any:
    """Gradients of an accumulation over two micro-batches, clipped by their norm over both processes."""
    torch.manual_seed(0)
    model = accelerator.prepare(torch.nn.Linear(2, 1, bias=False))
    inner = accelerator.unwrap_model(model)
    results: list[Any] = []
    accelerator.gradient_accumulation_steps = 2
    for number in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 2), float(rank + number))).sum())
            results.append([accelerator.sync_gradients, inner.weight.grad.clone()])
            if accelerator.sync_gradients:
                results.append([accelerator.clip_grad_norm_(model.parameters(), 0.5), inner.weight.grad.clone()])
                model.zero_grad()
    accelerator.gradient_accumulation_steps = 1
    return results


@scenario(processes=2, extra=True)
def two_processes_use_the_accelerator_of_their_trainer(side: Side) -> Record:
    trainer = side.vector_trainer(rows=8)
    accelerator, rank = trainer.accelerator, dist.get_rank()
    extra = {
        "exchanged": exchanged(accelerator, rank),
        "shares": shares(accelerator),
        "turns": turns(accelerator),
        "facts": facts(accelerator),
        "data parallel": data_parallel(accelerator, rank),
        "loaders": loaders(accelerator),
        "accumulating": accumulating(accelerator, rank),
    }
    return side.train(trainer, extra=extra)
