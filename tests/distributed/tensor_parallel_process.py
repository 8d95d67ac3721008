"""Tensor parallelism in several processes: `python -m tests.distributed.tensor_parallel_process FOLDER`.

A launcher's variables set rank and size. Each process writes its results to `FOLDER/RANK.pickle`. A single process runs
the same trainings without sharding.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchmetrics.classification import MulticlassStatScores

from littrainer import Trainer
from littrainer.distributed.layout import get_process_layout
from tests.distributed.sharded_process import PROMPT, curve
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows
from tests.scenarios.models import CLASSES, FEATURES, VectorClassifier, tiny_llama
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

TOKENS = 33
EVALUATED_ROWS = 7


def size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def llama(**changes: Any) -> Any:
    """Return a model whose heads, but not its vocabulary, are divisible by two."""
    torch.manual_seed(0)
    return tiny_llama(
        **{
            "vocab_size": TOKENS,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "tie_word_embeddings": False,
            **changes,
        }
    )


def qwen() -> Any:
    """Return a model with norms of attention heads, whose weights all processes share."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=TOKENS,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            hidden_size=16,
            intermediate_size=24,
            tie_word_embeddings=True,
        )
    )


class Planned(VectorClassifier):
    """A plain module with a plan: layers with biases, and replicated layers."""

    tp_plan = {"outer": "colwise", "inner": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(FEATURES, self.inner.in_features)
        self.inner = nn.Linear(self.inner.in_features, self.inner.out_features)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        # All processes must draw the same dropout mask.
        dropped = nn.functional.dropout(self.inner(torch.relu(self.outer(x))), 0.2, self.training)
        return self.head(self.norm(dropped))


def make_trainer(folder: Path, model: Any, kind: type[Trainer] = Trainer, **changes: Any) -> Trainer:
    """Return a Trainer over token rows, with tensor parallelism in several processes."""
    layout = {"parallelism_config": {"tp_size": size()}} if size() > 1 else {}
    keywords = {
        "train_dataset": Rows(remap(language_rows(30))),
        "eval_dataset": Rows(remap(language_rows(EVALUATED_ROWS, seed=1))),
        "data_collator": pad_tokens,
        "compute_metrics": lambda output: {"rows": len(output.predictions), "sum": float(output.predictions.sum())},
    }
    arguments = {
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "include_num_input_tokens_seen": True,
        **layout,
        **changes,
    }
    return quiet_trainer(folder, model, kind=kind, trainer_kwargs=keywords, **arguments)


def remap(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with token ids of the small vocabulary."""
    return [
        {
            "input_ids": [token % TOKENS for token in row["input_ids"]],
            "labels": [token if token < 0 else token % TOKENS for token in row["labels"]],
        }
        for row in rows
    ]


def train_by_plan(folder: Path) -> dict[str, Any]:
    """Train by the model's plan, evaluate, predict, generate, save and resume."""
    trainer = make_trainer(folder / "run", llama(), save_strategy="steps", save_steps=2)
    trainer.train()
    results = {
        "curve": curve(trainer),
        "tokens": trainer.state.num_input_tokens_seen,
        "flos": trainer.state.total_flos,
        "metrics": {name: trainer.evaluate()[name] for name in ("eval_loss", "eval_rows", "eval_sum")},
        "predictions": trainer.predict(trainer.eval_dataset).predictions,
        "generated": trainer.model.generate(torch.tensor(PROMPT), max_new_tokens=4, do_sample=False).tolist(),
        "split": sorted(
            name for name, parameter in trainer.model.named_parameters() if hasattr(parameter, "full_tensor")
        ),
        "total batch": trainer.get_total_train_batch_size(trainer.args),
        "sizes": (trainer.get_tp_size(), get_process_layout(trainer.args).data_parallel),
    }
    trainer.save_model(str(folder / "saved"))
    resumed = make_trainer(folder / "run", llama(), save_strategy="no")
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    results["resumed"] = curve(resumed)
    return results


def train_with(make: Callable[[], Any], **changes: Any) -> Callable[[Path], Any]:
    """Return a function that trains and returns losses and gradient norms."""

    def train(folder: Path) -> Any:
        trainer = make_trainer(folder, make(), **changes)
        trainer.train()
        return curve(trainer)

    return train


def make_planned_trainer(folder: Path, **keywords: Any) -> Trainer:
    """Return a Trainer with a plain module."""
    torch.manual_seed(0)
    changes: dict[str, Any] = {"parallelism_config": {"tp_size": size()}} if size() > 1 else {}
    changes |= {"logging_strategy": "steps", "logging_steps": 1, "save_strategy": "steps", "save_steps": 2}
    return quiet_trainer(folder, Planned(), max_steps=4, weight_decay=0.1, trainer_kwargs=keywords, **changes)


def train_plain_module(folder: Path) -> Any:
    """Train after an evaluation, which shards the model."""
    trainer = make_planned_trainer(folder)
    trainer.evaluate()
    trainer.train()
    resumed = make_planned_trainer(folder / "resumed")
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert curve(resumed) == curve(trainer)
    return curve(trainer)


def compute_streaming_metrics(folder: Path) -> dict[str, Any]:
    """Compute streaming metrics, which are summed over processes."""
    trainer = make_planned_trainer(folder, compute_metrics=MulticlassStatScores(CLASSES, average="micro"))
    return {name: value for name, value in trainer.evaluate().items() if not re.search("time|per_second", name)}


def train_loaded_model(folder: Path) -> dict[str, Any]:
    """Compute a gradient with, and train, a model that transformers has sharded while loading."""
    saved = folder / "initial"
    if os.environ.get("RANK", "0") == "0":
        llama().save_pretrained(folder / "writing")
        (folder / "writing").rename(saved)
    if size() == 1:
        model = llama()
    else:
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        torch.distributed.barrier()
        model = AutoModelForCausalLM.from_pretrained(saved, distributed_config=DistributedConfig(tp_size=size()))
    batch = pad_tokens(remap(language_rows(4)))
    loss = model(**batch).loss
    loss.backward()
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad
    gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    model.zero_grad()
    trainer = make_trainer(folder / "run", model, parallelism_config=None)
    trainer.train()
    return {
        "loss": loss.item(),
        "gradient": gradient.detach().numpy(),
        "curve": curve(trainer),
        "sizes": (trainer.get_tp_size(), get_process_layout(trainer.args).data_parallel),
    }


def train_replicas(folder: Path) -> dict[str, Any]:
    """Train two replicas with tensor parallelism over two processes each, and resume."""
    layout = {"tp_size": 2, "dp_replicate_size": 2} if size() > 1 else None
    samples = 2 if size() > 1 else 4
    changes: dict[str, Any] = {"parallelism_config": layout, "per_device_train_batch_size": samples, "max_steps": 3}
    changes |= {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(folder, llama(), **changes)
    trainer.train()
    resumed = make_trainer(folder / "resumed", llama(), **changes)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return {"curve": curve(trainer), "resumed": curve(resumed), "rows": trainer.evaluate()["eval_rows"]}


CHECKS: dict[str, Callable[[Path], Any]] = {
    "by plan": train_by_plan,
    "manual": train_with(llama, kind=StepwiseTrainer),
    "tied": train_with(lambda: llama(tie_word_embeddings=True)),
    "heads with norms": train_with(qwen),
    "plain module": train_plain_module,
    "loaded split": train_loaded_model,
    "streamed": compute_streaming_metrics,
}


def main(folder: Path, checks: dict[str, Callable[[Path], Any]] = CHECKS) -> None:
    results = {}
    for name, check in checks.items():
        check_folder = folder / name.replace(" ", "-")
        check_folder.mkdir(parents=True, exist_ok=True)
        results[name] = check(check_folder)
    (folder / f"{os.environ.get('RANK', '0')}.pickle").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), {"replicas": train_replicas} if size() > 2 else CHECKS)
