"""Checks in a process that sees two simulated GPUs: `python -m tests.simulated_gpu.run`."""

from __future__ import annotations

import importlib
import logging
import tempfile
from typing import Any

import torch

from tests.scenarios.models import tiny_llama
from tests.simulated_gpu.measured_trainings import make_trainer


def make_dispatched_llama() -> Any:
    """A Llama with its first layer on one GPU and its second on the other."""
    from accelerate import dispatch_model

    layers = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    layers |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    return dispatch_model(tiny_llama(num_hidden_layers=2), layers)


def train_model_on_two_gpus(side_name: str) -> dict[str, Any]:
    """Train, evaluate and save a model whose layers are on two GPUs."""
    side = importlib.import_module(side_name)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(side, "dispatched Llama", folder, eval_strategy="epoch", save_strategy="epoch")
        trainer.train()
    return {
        "losses": [log[name] for log in trainer.state.log_history for name in ("loss", "eval_loss") if name in log],
        "weights": {name: value.cpu() for name, value in trainer.model.state_dict().items()},
        "devices": sorted({str(parameter.device) for parameter in trainer.model.parameters()}),
        "is parallel": trainer.is_model_parallel,
    }


def train_on_the_first_of_two_gpus() -> dict[str, Any]:
    """Train a plain model in one process that sees two GPUs, and note the warnings."""
    messages: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("littrainer").addHandler(Recorder(logging.WARNING))
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(importlib.import_module("littrainer"), "MLP", folder)
        trainer.train()
    return {
        "device": str(trainer.args.device),
        "warnings": [message for message in messages if "GPU" in message],
        "left on the second": torch.cuda.memory_allocated(1),
    }
