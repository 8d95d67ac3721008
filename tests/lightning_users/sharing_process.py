"""One of two processes that share a module's model: `python -m tests.lightning_users.sharing_process FOLDER`.

Rank and world size come from the environment. Each process writes what it found to `FOLDER/RANK.pickle`.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from littrainer import TrainerDataModule, TransformersModule, set_seed
from littrainer.strategies.shards import whole_state_dict
from tests.lightning_users.curves import QUIET
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, token_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import CLASSES, tiny_bert_classifier, tiny_llama
from tests.scenarios.other_processes import end_process

RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "2"))
GLOO = {"process_group_backend": "gloo"}
ROWS = 24
STRATEGIES: dict[str, Any] = {
    "ddp": lambda: DDPStrategy(**GLOO),
    "fsdp2": lambda: ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False, **GLOO
    ),
    "tensor parallel": lambda: ModelParallelStrategy(
        data_parallel_size=1, tensor_parallel_size=2, save_distributed_checkpoint=False, **GLOO
    ),
}
# An odd number, so that the last batch of one process is filled up.
EVALUATED_ROWS = 7


def plain_loader(processes: int, batch_size: int) -> DataLoader[Any]:
    rows = Rows(language_rows(ROWS))
    sampler = DistributedSampler(rows, num_replicas=processes, rank=RANK % processes, shuffle=False)
    return DataLoader(rows, batch_size=batch_size, sampler=sampler, collate_fn=pad_tokens)


def trained(folder: Path, name: str) -> dict[str, Any]:
    """A training with windows of two micro-batches, the last window of one; and the model as it is exported."""
    set_seed(0)
    processes = 1 if name == "tensor parallel" else PROCESSES
    losses: list[float] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            losses.append(trainer.callback_metrics.get("train_loss", torch.tensor(0.0)).item())

    # A function makes the model, and the processes draw different weights: those of the first count.
    module = TransformersModule(
        lambda: (set_seed(RANK), tiny_llama(num_key_value_heads=2))[1],
        {"learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.5, "weight_decay": 0.1},
    )
    trainer = pl.Trainer(
        max_epochs=1,
        accumulate_grad_batches=2,
        strategy=STRATEGIES[name](),
        devices=PROCESSES,
        use_distributed_sampler=False,
        log_every_n_steps=1,
        callbacks=[Watch()],
        **QUIET,
    )
    trainer.fit(module, plain_loader(processes, 4 * PROCESSES // processes))
    split = {type(parameter).__name__ for parameter in module.model.parameters()}
    module.export_pretrained(folder / name)
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    state = whole_state_dict(module.model)
    return {"losses": losses, "split": split, "weights": {key: value.clone() for key, value in state.items()}}


def formats_in_half_precision() -> list[torch.dtype]:
    """What a layer of a sharded model computes with in a `bf16-mixed` training, and what its loss is in."""
    set_seed(0)
    module = TransformersModule(tiny_llama(), {"learning_rate": 0.1})
    found: list[torch.dtype] = []
    layer: Any = module.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda *_: found.append(layer.weight.dtype))
    module.model.register_forward_hook(lambda *given: found.append(given[-1].loss.dtype))
    trainer = pl.Trainer(
        max_steps=1,
        precision="bf16-mixed",
        strategy=STRATEGIES["fsdp2"](),
        devices=PROCESSES,
        use_distributed_sampler=False,
        **QUIET,
    )
    trainer.fit(module, plain_loader(PROCESSES, 4))
    return found[-2:]


def evaluated() -> dict[str, Any]:
    """Metrics of a function and of torchmetrics over rows that do not divide evenly."""
    found: dict[str, Any] = {}
    metrics: dict[str, Any] = {
        "function": accuracy,
        "torchmetrics": torchmetrics.MetricCollection(
            {"accuracy": torchmetrics.Accuracy("multiclass", num_classes=CLASSES)}
        ),
    }
    for name, compute_metrics in metrics.items():
        set_seed(0)
        module = TransformersModule(tiny_bert_classifier(), compute_metrics=compute_metrics)
        data = TrainerDataModule(
            eval_dataset=Rows(token_rows(EVALUATED_ROWS, 5)),
            args={"per_device_eval_batch_size": 2},
            data_collator=pad_tokens,
        )
        trainer = pl.Trainer(strategy=STRATEGIES["ddp"](), devices=PROCESSES, use_distributed_sampler=False, **QUIET)
        (found[name],) = trainer.validate(module, data, verbose=False)
    return found


def main(folder: Path) -> None:
    environment = dict(os.environ)
    found: dict[str, Any] = {}
    for name in STRATEGIES:
        found[name] = trained(folder, name)
        # When Lightning is done it deletes WORLD_SIZE.
        os.environ.update(environment)
    found["formats"] = formats_in_half_precision()
    os.environ.update(environment)
    found["metrics"] = evaluated()
    (folder / f"{RANK}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_process()
