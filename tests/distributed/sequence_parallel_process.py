"""Processes that share rows: `python -m tests.distributed.sequence_parallel_process FOLDER`.

A launcher's variables set rank and size. Each process writes its results to `FOLDER/RANK.pickle`. A single process runs
the same trainings without sharing rows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM

from littrainer import Trainer, TrainerCallback
from tests.distributed.sharded_process import PROMPT, curve
from tests.distributed.tensor_parallel_process import llama, main, make_trainer, qwen, remap, size
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows
from tests.scenarios.trainers import StepwiseTrainer

ROWS_IN_A_STEP = 4
EVALUATED_ROWS = 8


class GradientRecorder(TrainerCallback):
    """Record of the gradients of the first optimizer step."""

    def __init__(self) -> None:
        self.gradients: dict[str, Any] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 0:
            for name, parameter in model.named_parameters():
                gradient = parameter.grad
                gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                self.gradients[name] = gradient.detach().clone().numpy()


class LogitsTrainer(Trainer):
    """A Trainer whose loss is computed from logits of full rows."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        targets = inputs["labels"][:, 1:].flatten()
        loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), targets)
        return (loss, outputs) if return_outputs else loss


def make_sharing_trainer(folder: Path, model: Any, layout: dict[str, Any], **changes: Any) -> Trainer:
    """Return a Trainer whose optimizer steps have the same rows in any number of processes."""
    config, samples = None, ROWS_IN_A_STEP
    if size() > 1:
        config = {name: value for name, value in layout.items() if value != 1}
        samples //= config.get("dp_shard_size", 1) * config.get("dp_replicate_size", 1)
        changes |= {"fsdp": True} if "dp_shard_size" in config else {}
    model.config.use_cache = False
    changes |= {"per_device_train_batch_size": samples, "per_device_eval_batch_size": samples, "max_grad_norm": 100.0}
    trainer = make_trainer(folder, model, parallelism_config=config, **changes)
    # An even number, so that data-parallel processes repeat no row.
    trainer.eval_dataset = Rows(remap(language_rows(EVALUATED_ROWS, seed=1)))
    trainer.add_callback(GradientRecorder())
    return trainer


def get_results(trainer: Any) -> dict[str, Any]:
    (recorder,) = (callback for callback in trainer.callback_handler.callbacks if type(callback) is GradientRecorder)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return {"curve": curve(trainer), "gradients": recorder.gradients, "evaluated": losses}


def train_with(
    make_model: Callable[[], Any], layout: dict[str, Any], collate: Any = None, **changes: Any
) -> Callable[[Path], Any]:
    """Return a function that trains and returns losses, gradient norms and the first gradients."""

    def train(folder: Path) -> Any:
        trainer = make_sharing_trainer(folder, make_model(), layout, **{"max_steps": 2, **changes})
        trainer.data_collator = collate or trainer.data_collator
        trainer.train()
        return get_results(trainer)

    return train


def make_llama(attention: str = "sdpa", **changes: Any) -> Callable[[], Any]:
    return lambda: llama(attn_implementation=attention, **changes)


def pad_left(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: values.flip(1) for name, values in pad_tokens(reverse(rows)).items()}


def reverse(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: values[::-1] for name, values in row.items()} for row in rows]


def shorten(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a batch whose rows have fewer positions than there are processes."""
    return {name: values[:, -3:] for name, values in pad_left(rows).items()}


def run_all_phases(layout: dict[str, Any]) -> Callable[[Path], Any]:
    """Return a function that evaluates before, within and after training, predicts, generates, saves and resumes."""

    def run(folder: Path) -> Any:
        # Three steps do not read the whole dataset, whose end data-parallel processes fill with repeated rows.
        steps: dict[str, Any] = {"max_steps": 3}
        steps |= {"save_strategy": "steps", "save_steps": 2, **EVALUATED}
        make_model = make_llama(num_key_value_heads=4)
        trainer = make_sharing_trainer(folder / "run", make_model(), layout, **steps)
        first = trainer.evaluate()["eval_loss"]
        trainer.train()
        results = {
            **get_results(trainer),
            "first": first,
            "metrics": {name: trainer.evaluate()[name] for name in ("eval_loss", "eval_rows")},
            "predictions": trainer.predict(trainer.eval_dataset).predictions,
            "counts": (trainer.state.num_input_tokens_seen, trainer.state.total_flos),
            "total batch": trainer.get_total_train_batch_size(trainer.args),
            "sizes": (trainer.get_sp_size(), trainer.get_cp_size(), trainer.get_tp_size()),
            "hooks": len(trainer.model._forward_hooks),
            "sequences": trainer.session.sequences,
        }
        prompt = torch.tensor(PROMPT)
        results["generated"] = trainer.model.generate(prompt, max_new_tokens=4, do_sample=False).tolist()
        trainer.save_model(str(folder / "saved"))
        resumed = make_sharing_trainer(folder / "resumed", make_model(), layout, max_steps=3)
        resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
        return {**results, "resumed": curve(resumed)}

    return run


class RollingForCausalLM(LlamaForCausalLM):
    """A model in which positions are combined outside of attention, too."""

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, **kwargs: Any) -> Any:
        embeddings = self.model.embed_tokens(input_ids)
        embeddings = embeddings + nn.functional.pad(embeddings[:, :-1], (0, 0, 1, 0))
        return super().forward(inputs_embeds=embeddings, position_ids=position_ids, **kwargs)


def refuse(folder: Path) -> dict[str, str]:
    """Return the errors of trainings in which processes cannot share rows."""
    length = {"sp_seq_length": 5, "sp_seq_length_is_variable": False}
    trainers: dict[str, Callable[[], Trainer]] = {
        "length": lambda: make_sharing_trainer(folder, llama(), {**HEADS, "sp_handler": length}),
        "heads": lambda: make_sharing_trainer(folder, llama(num_key_value_heads=1), HEADS),
        "flex contexts": lambda: make_sharing_trainer(folder, llama(attn_implementation="flex_attention"), KEYS),
        "rolling": lambda: make_sharing_trainer(folder, RollingForCausalLM(llama().config), HEADS),
        "argument": lambda: make_sharing_trainer(folder, llama(), KEYS, neftune_noise_alpha=5.0),
        "rows": lambda: make_sharing_trainer(folder, llama(), HEADS),
        "images": lambda: make_sharing_trainer(folder, llama(), HEADS, remove_unused_columns=False),
    }
    errors = {}
    for name, make in trainers.items() if size() > 1 else ():
        trainer = make()
        if name == "rows":
            rank = int(os.environ["RANK"])
            trainer.train_dataset = Rows([{"input_ids": [5, 6, 7 + rank], "labels": [5, 6, 7]}] * 8)
        if name == "images":
            collate = trainer.data_collator
            trainer.data_collator = lambda rows: {**collate(rows), "pixel_values": torch.ones(len(rows), 3)}  # noqa: B023
        try:
            trainer.train()
        except ValueError as error:
            errors[name] = str(error)
    return errors


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
HEADS, KEYS = {"sp_size": size()}, {"cp_size": size()}
EXCHANGED_KEYS = {"cp_size": size(), "cp_handler": {"cp_comm_strategy": "alltoall"}}
IN_TWO: dict[str, Callable[[Path], Any]] = {
    "all phases": run_all_phases(HEADS),
    "all phases of contexts": run_all_phases(KEYS),
    "eager": train_with(make_llama("eager"), HEADS),
    "qwen": train_with(qwen, HEADS),
    "contexts of qwen": train_with(qwen, KEYS),
    "eager contexts": train_with(make_llama("eager"), KEYS),
    "exchanged contexts": train_with(make_llama(), EXCHANGED_KEYS),
    "smoothed": train_with(make_llama(), HEADS, label_smoothing_factor=0.1),
    "smoothed in chunks": train_with(make_llama(), HEADS, label_smoothing_factor=0.1, chunked_loss=True),
    "checkpointed": train_with(make_llama(), HEADS, gradient_checkpointing=True),
    "own loss": train_with(make_llama(), HEADS, kind=LogitsTrainer, prediction_loss_only=True, **EVALUATED),
    "own step": train_with(make_llama(), KEYS, kind=StepwiseTrainer),
    "padded on the left": train_with(make_llama("eager"), KEYS, pad_left),
    "packed": train_with(make_llama(), HEADS, pack_to_length=24, gradient_accumulation_steps=1),
}
IN_FOUR: dict[str, Callable[[Path], Any]] = {
    "all phases": run_all_phases({"sp_size": 2, "dp_shard_size": 2}),
    "contexts": train_with(make_llama(), {"cp_size": 2, "dp_shard_size": 2}),
    "copies of qwen": train_with(qwen, {"sp_size": 2, "dp_replicate_size": 2}),
    "four heads": train_with(make_llama(num_key_value_heads=4), {"sp_size": 4}),
    "four parts": train_with(make_llama(), {"cp_size": 4}),
    "short rows": train_with(make_llama(num_key_value_heads=4), {"sp_size": 4}, shorten),
}


if __name__ == "__main__":
    main(Path(sys.argv[1]), IN_FOUR if size() == 4 else {**IN_TWO, "refused": refuse})
