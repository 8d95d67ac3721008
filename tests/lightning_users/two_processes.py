"""A process of two under Lightning: `python -m tests.lightning_users.two_processes FOLDER`.

Rank and world size are in the environment. Each process writes its results to `FOLDER/RANK.pickle`.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from littrainer import TrainerDataModule, TransformersModule, set_seed
from littrainer.strategies.full_state import get_full_state_dict
from tests.lightning_users import reading
from tests.lightning_users.curves import JOBS, QUIET, Job, data_module, train_with_lightning, train_with_trainer
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, tag_rows, token_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import CLASSES, tiny_bert_classifier, tiny_bert_tagger, tiny_gpt2, tiny_llama
from tests.scenarios.other_processes import end_process
from tests.scenarios.trainers import quiet_trainer

RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "2"))
# A copy, since Lightning deletes WORLD_SIZE.
ENVIRONMENT = dict(os.environ)
GLOO = {"process_group_backend": "gloo"}
STRATEGIES: dict[str, Any] = {
    "ddp": lambda: DDPStrategy(**GLOO),
    "fsdp2": lambda: ModelParallelStrategy(2, 1, save_distributed_checkpoint=False, **GLOO),
    "tensor parallel": lambda: ModelParallelStrategy(1, 2, save_distributed_checkpoint=False, **GLOO),
}
# With three micro-batches per process, the last window has one.
ACCUMULATION = 2
# An odd number, so that a last batch is padded.
EVALUATED_ROWS = 7
TAGGER = partial(tiny_bert_tagger, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
# After the first window of the second epoch.
SAVED_AFTER = 5


def loader_in_order(rows: Any, batch_size: int, processes: int = PROCESSES) -> DataLoader[Any]:
    """Return a loader with a sampler; Lightning's sampler would shuffle."""
    sampler = DistributedSampler(rows, num_replicas=processes, rank=RANK % processes, shuffle=False)
    return DataLoader(rows, batch_size=batch_size, sampler=sampler, collate_fn=pad_tokens)


def lightning_trainer(strategy: str = "ddp", **keywords: Any) -> pl.Trainer:
    os.environ.update(ENVIRONMENT)
    keywords = {"strategy": STRATEGIES[strategy](), "devices": PROCESSES, **QUIET, **keywords}
    return pl.Trainer(use_distributed_sampler=False, **keywords)


# ---- The same numbers ------------------------------------------------------------------------------------------------


def curves(folder: Path) -> dict[str, Any]:
    def loaders(job: Job, args: dict[str, Any]) -> dict[str, Any]:
        return {
            "train_dataloaders": loader_in_order(job.training_rows, 4),
            "val_dataloaders": loader_in_order(job.evaluation_rows, 3),
        }

    job = JOBS["language model"]
    # The sampler distributes single rows and a Trainer batches, so optimizer steps have the same rows only if their
    # number divides evenly. AdamW would amplify rounding errors, and dropout would differ.
    even = replace(job, rows=24, model=partial(tiny_gpt2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    sgd = {"optim": "sgd", "learning_rate": 0.5}
    in_order = {"train_sampling_strategy": "sequential"}
    results = {
        "ours": train_with_trainer(folder / "run", job, ACCUMULATION),
        "ours, in order": train_with_trainer(folder / "run", even, ACCUMULATION, **in_order, **sgd),
        "lightning": train_with_lightning(job, ACCUMULATION, data_module, PROCESSES),
    }
    os.environ.update(ENVIRONMENT)
    return {**results, "plain loaders": train_with_lightning(even, ACCUMULATION, loaders, PROCESSES, **sgd)}


# ---- Data ------------------------------------------------------------------------------------------------------------


def run_data(folder: Path) -> dict[str, Any]:
    """Return the batches of map-style data, three of 4 rows in each process, and of a stream."""
    rows, stream = reading.Numbers(22), reading.StreamOfNumbers(44)

    def run_trainer(data: Any, **arguments: Any) -> list[Any]:
        options = {"train_dataset": data, "data_collator": reading.collate_with_noise}
        changes = {**reading.ARGUMENTS, "num_train_epochs": 2, "gradient_accumulation_steps": 2, "seed": 5, **arguments}
        trainer = quiet_trainer(folder / "run", reading.RecordingModel(), trainer_kwargs=options, **changes)
        trainer.train()
        return trainer.model.records

    def run_lightning(data: Any, seed: int = 5, **keywords: Any) -> list[Any]:
        os.environ.update(ENVIRONMENT)
        keywords = {"max_epochs": 2, **keywords, "accumulate_grad_batches": 2, "devices": PROCESSES}
        module = reading.numbers_module(data, reading.collate_with_noise)
        # With Lightning's default `use_distributed_sampler`.
        return reading.fit(
            reading.CountingModule(), module, seed=seed, strategy=STRATEGIES["ddp"](), **keywords
        ).records

    os.environ.update(ENVIRONMENT)
    checkpoint = folder / "saved.ckpt"
    saving = reading.SaveOnce(checkpoint, "on_train_batch_end", SAVED_AFTER)
    return {
        "ours": run_trainer(rows),
        "our stream": run_trainer(stream, max_steps=2),
        "lightning": run_lightning(rows, callbacks=[saving]),
        "stream": run_lightning(stream, max_epochs=-1, max_steps=2),
        # Processes with different seeds.
        "resumed": run_lightning(rows, seed=70 + RANK, checkpoint=checkpoint),
        "unseeded": run_lightning(rows, seed=70 + RANK, max_epochs=1),
        "places": len(torch.load(checkpoint, weights_only=True)["TrainerDataModule"]["processes"]),
    }


# ---- Sharded models --------------------------------------------------------------------------------------------------


def train(folder: Path, name: str) -> dict[str, Any]:
    """Train with windows of two micro-batches, and export the model."""
    set_seed(0)
    processes = 1 if name == "tensor parallel" else PROCESSES
    losses: list[float] = []

    class LossRecorder(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            losses.append(trainer.callback_metrics.get("train_loss", torch.tensor(0.0)).item())

    # Processes draw different weights; those of rank 0 count.
    module = TransformersModule(
        lambda: (set_seed(RANK), tiny_llama(num_key_value_heads=2))[1],
        {"learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.5, "weight_decay": 0.1},
    )
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "log_every_n_steps": 1, "callbacks": [LossRecorder()]}
    trainer = lightning_trainer(name, max_epochs=1, **settings)
    trainer.fit(module, loader_in_order(Rows(language_rows(24)), 4 * PROCESSES // processes, processes))
    split = {type(parameter).__name__ for parameter in module.model.parameters()}
    module.export_pretrained(folder / name)
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    state = get_full_state_dict(module.model)
    return {"losses": losses, "split": split, "weights": {key: value.clone() for key, value in state.items()}}


def exact() -> dict[str, Any]:
    """Return losses and weights of a model that ignores the number of labels."""
    losses: list[float] = []

    class LossRecorder(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
            losses.extend([trainer.callback_metrics["train_loss"].item()] if index % 2 else [])

    arguments = {"learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0, "loss_normalization": "exact"}
    set_seed(0)
    module = TransformersModule(TAGGER(), arguments)
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "log_every_n_steps": 1, "callbacks": [LossRecorder()]}
    # A step has eight consecutive rows.
    lightning_trainer(max_epochs=1, **settings).fit(module, loader_in_order(Rows(tag_rows(24)), 2))
    return {"losses": losses, "weights": [weight.detach().clone() for weight in module.model.parameters()]}


def formats_in_half_precision() -> list[torch.dtype]:
    """Return the dtypes of a sharded layer's weight and of the loss in a `bf16-mixed` training."""
    set_seed(0)
    module = TransformersModule(tiny_llama(), {"learning_rate": 0.1})
    results: list[torch.dtype] = []
    layer: Any = module.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda *_: results.append(layer.weight.dtype))
    module.model.register_forward_hook(lambda *args: results.append(args[-1].loss.dtype))
    trainer = lightning_trainer("fsdp2", max_steps=1, precision="bf16-mixed")
    trainer.fit(module, loader_in_order(Rows(language_rows(24)), 4))
    return results[-2:]


def metrics() -> dict[str, Any]:
    """Return metrics of a function and of torchmetrics over rows that do not divide evenly."""
    results: dict[str, Any] = {}
    streamed = {"accuracy": torchmetrics.Accuracy("multiclass", num_classes=CLASSES)}
    kinds: dict[str, Any] = {"function": accuracy, "torchmetrics": torchmetrics.MetricCollection(streamed)}
    for name, compute_metrics in kinds.items():
        set_seed(0)
        module = TransformersModule(tiny_bert_classifier(), compute_metrics=compute_metrics)
        rows, args = Rows(token_rows(EVALUATED_ROWS, 5)), {"per_device_eval_batch_size": 2}
        data = TrainerDataModule(eval_dataset=rows, args=args, data_collator=pad_tokens)
        (results[name],) = lightning_trainer().validate(module, data, verbose=False)
    return results


def main(folder: Path) -> None:
    results: dict[str, Any] = {"curves": curves(folder), "read": run_data(folder)}
    results.update({name: train(folder, name) for name in STRATEGIES})
    results.update(formats=formats_in_half_precision(), metrics=metrics(), exact=exact())
    (folder / f"{RANK}.pickle").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_process()
