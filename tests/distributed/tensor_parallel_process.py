"""One of two processes that compute each layer together: `python -m tests.distributed.tensor_parallel_process FOLDER`.

Rank and size come from the environment, as a launcher sets it. Each process writes what it found to
`FOLDER/RANK.pickle`; with one process, the same trainings run without any splitting.
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
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows
from tests.scenarios.models import CLASSES, FEATURES, VectorClassifier, tiny_llama
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

TOKENS = 33
PROMPT = [[5, 6, 7]]
EVALUATED_ROWS = 7


def size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def llama(**changes: Any) -> Any:
    """Two layers whose heads divide by two; its vocabulary does not."""
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
    """Normalizes each attention head, and has weights for it that all processes share."""
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
    """A plain module with a plan of its own: layers with biases, one of them whole, and one with a norm before it."""

    tp_plan = {"outer": "colwise", "inner": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(FEATURES, self.inner.in_features)
        self.inner = nn.Linear(self.inner.in_features, self.inner.out_features)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        # The processes draw the same numbers here, as one process does.
        dropped = nn.functional.dropout(self.inner(torch.relu(self.outer(x))), 0.2, self.training)
        return self.head(self.norm(dropped))


def trainer_of(folder: Path, model: Any, kind: type[Trainer] = Trainer, **changes: Any) -> Trainer:
    """A Trainer over token rows, whose model two processes compute together."""
    layout = {"parallelism_config": {"tp_size": size()}} if size() > 1 else {}
    given = {
        "train_dataset": Rows(remapped(language_rows(30))),
        "eval_dataset": Rows(remapped(language_rows(EVALUATED_ROWS, seed=1))),
        "data_collator": pad_tokens,
        "compute_metrics": lambda found: {"rows": len(found.predictions), "sum": float(found.predictions.sum())},
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
    return quiet_trainer(folder, model, kind=kind, given=given, **arguments)


def remapped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with token ids of the small vocabulary."""
    return [
        {
            "input_ids": [token % TOKENS for token in row["input_ids"]],
            "labels": [token if token < 0 else token % TOKENS for token in row["labels"]],
        }
        for row in rows
    ]


def curve(trainer: Trainer) -> list[tuple[float, float]]:
    """Losses and gradient norms of a training."""
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]


def by_plan(folder: Path) -> dict[str, Any]:
    """A training by the model's own plan, its evaluations, predictions and generated tokens, saved and resumed."""
    trainer = trainer_of(folder / "run", llama(), save_strategy="steps", save_steps=2)
    trainer.train()
    found = {
        "curve": curve(trainer),
        "tokens": trainer.state.num_input_tokens_seen,
        "flos": trainer.state.total_flos,
        "metrics": {name: trainer.evaluate()[name] for name in ("eval_loss", "eval_rows", "eval_sum")},
        "predictions": trainer.predict(trainer.eval_dataset).predictions,
        "generated": trainer.model.generate(torch.tensor(PROMPT), max_new_tokens=4, do_sample=False).tolist(),
        "split": sorted(name for name, one in trainer.model.named_parameters() if hasattr(one, "full_tensor")),
        "total batch": trainer.get_total_train_batch_size(trainer.args),
        "sizes": (trainer.get_tp_size(), get_process_layout(trainer.args).data_parallel),
    }
    trainer.save_model(str(folder / "saved"))
    resumed = trainer_of(folder / "run", llama(), save_strategy="no")
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    found["resumed"] = curve(resumed)
    return found


def trained(make: Callable[[], Any], **changes: Any) -> Callable[[Path], Any]:
    """A training alone, with its losses."""

    def train(folder: Path) -> Any:
        trainer = trainer_of(folder, make(), **changes)
        trainer.train()
        return curve(trainer)

    return train


def planned_trainer(folder: Path, **given: Any) -> Trainer:
    """A Trainer over a module that is none of transformers'."""
    torch.manual_seed(0)
    changes: dict[str, Any] = {"parallelism_config": {"tp_size": size()}} if size() > 1 else {}
    changes |= {"logging_strategy": "steps", "logging_steps": 1, "save_strategy": "steps", "save_steps": 2}
    return quiet_trainer(folder, Planned(), max_steps=4, weight_decay=0.1, given=given, **changes)


def plain_module(folder: Path) -> Any:
    """A training that begins after an evaluation, which has split the model already."""
    trainer = planned_trainer(folder)
    trainer.evaluate()
    trainer.train()
    resumed = planned_trainer(folder / "resumed")
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert curve(resumed) == curve(trainer)
    return curve(trainer)


def streamed(folder: Path) -> dict[str, Any]:
    """Metrics that are updated batch by batch, and summed over processes at the end."""
    trainer = planned_trainer(folder, compute_metrics=MulticlassStatScores(CLASSES, average="micro"))
    return {name: value for name, value in trainer.evaluate().items() if not re.search("time|per_second", name)}


def loaded_split(folder: Path) -> dict[str, Any]:
    """A model that transformers has split when it was loaded: what it computes alone, and trained by a Trainer."""
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
    batch = pad_tokens(remapped(language_rows(4)))
    loss = model(**batch).loss
    loss.backward()
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad
    gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    model.zero_grad()
    trainer = trainer_of(folder / "run", model, parallelism_config=None)
    trainer.train()
    return {
        "loss": loss.item(),
        "gradient": gradient.detach().numpy(),
        "curve": curve(trainer),
        "sizes": (trainer.get_tp_size(), get_process_layout(trainer.args).data_parallel),
    }


def replicas(folder: Path) -> dict[str, Any]:
    """A training of two copies of a model, each of whose layers two processes compute together, and its resume."""
    layout = {"tp_size": 2, "dp_replicate_size": 2} if size() > 1 else None
    samples = 2 if size() > 1 else 4
    changes: dict[str, Any] = {"parallelism_config": layout, "per_device_train_batch_size": samples, "max_steps": 3}
    changes |= {"save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of(folder, llama(), **changes)
    trainer.train()
    resumed = trainer_of(folder / "resumed", llama(), **changes)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return {"curve": curve(trainer), "resumed": curve(resumed), "rows": trainer.evaluate()["eval_rows"]}


CHECKS: dict[str, Callable[[Path], Any]] = {
    "by plan": by_plan,
    "manual": trained(llama, kind=StepwiseTrainer),
    "tied": trained(lambda: llama(tie_word_embeddings=True)),
    "heads with norms": trained(qwen),
    "plain module": plain_module,
    "loaded split": loaded_split,
    "streamed": streamed,
}


def main(folder: Path) -> None:
    found = {}
    checks = {"replicas": replicas} if size() > 2 else CHECKS
    for name, check in checks.items():
        place = folder / name.replace(" ", "-")
        place.mkdir(parents=True, exist_ok=True)
        found[name] = check(place)
    (folder / f"{os.environ.get('RANK', '0')}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
