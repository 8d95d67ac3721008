"""Waits for the device and peaks of memory in trainings of a side: `measure_waits` and `measure_memory`.

Both run in a process with a simulated GPU, with transformers' Trainer or with ours, and return plain values.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, tag_rows, token_rows, translation_rows, vector_rows
from tests.scenarios.models import (
    VectorClassifier,
    tiny_bert_classifier,
    tiny_llama,
    tiny_lora_tagger,
    tiny_t5,
)

STEPS, LOGGING_STEPS, SAVE_STEPS = 8, 4, 4
EVALUATION_BATCHES = 6
BATCH_SIZE = 4
MIB = 1 << 20


def pad_pairs(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    from tests.scenarios.collators import pad_translations

    return pad_translations(rows)


def wide_llama() -> Any:
    """A Llama whose weights take more memory than everything else that a Trainer keeps."""
    return tiny_llama(hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)


def dispatched_llama() -> Any:
    from tests.simulated_gpu.several_gpus import make_dispatched_llama

    return make_dispatched_llama()


LARGE_VOCABULARY = 128_000


def large_vocabulary_llama() -> Any:
    return tiny_llama(vocab_size=LARGE_VOCABULARY, max_position_embeddings=128)


def long_language_rows(count: int) -> list[Any]:
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, LARGE_VOCABULARY, (count, 128)).tolist()]


class TermsClassifier(VectorClassifier):
    """A classifier whose outputs have a further loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = super().forward(x, labels)
        return {**outputs, "norm_loss": outputs["logits"].pow(2).mean()}


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], list[Any]], Any]] = {
    "MLP": (VectorClassifier, vector_rows, None),
    "BERT": (tiny_bert_classifier, token_rows, pad_tokens),
    "Llama": (tiny_llama, language_rows, pad_tokens),
    "T5": (tiny_t5, translation_rows, pad_pairs),
    "BERT with LoRA": (tiny_lora_tagger, tag_rows, pad_tokens),
    "wide Llama": (wide_llama, language_rows, pad_tokens),
    "Llama with a large vocabulary": (large_vocabulary_llama, long_language_rows, pad_tokens),
    "MLP with loss terms": (TermsClassifier, vector_rows, None),
    "dispatched Llama": (dispatched_llama, language_rows, pad_tokens),
}


@dataclass(frozen=True)
class Training:
    """A training whose waits are counted.

    Parameters:
        model: its key in `MODELS`.
        arguments: arguments on top of those of every training.
        uses_lightnings_loop: whether Lightning's own loop runs instead of the fast loop; ours alone.
    """

    model: str
    arguments: dict[str, Any] = field(default_factory=dict)
    uses_lightnings_loop: bool = False


TRAININGS: dict[str, Training] = {
    "MLP": Training("MLP"),
    "MLP, bf16": Training("MLP", {"bf16": True}),
    "MLP, fp16": Training("MLP", {"fp16": True}),
    "MLP, accumulation 4": Training("MLP", {"gradient_accumulation_steps": 4}),
    "MLP, Lightning's loop": Training("MLP", uses_lightnings_loop=True),
    "BERT": Training("BERT"),
    "BERT with LoRA": Training("BERT with LoRA"),
    "Llama": Training("Llama"),
    "Llama, bf16": Training("Llama", {"bf16": True}),
    "Llama, accumulation 4": Training("Llama", {"gradient_accumulation_steps": 4}),
    "T5": Training("T5"),
}


def make_trainer(side: Any, model: str, folder: str, callbacks: tuple[Any, ...] = (), **arguments: Any) -> Any:
    make, rows, collator = MODELS[model]
    torch.manual_seed(0)
    settings = {
        "max_steps": STEPS,
        "logging_steps": LOGGING_STEPS,
        "per_device_train_batch_size": BATCH_SIZE,
        "per_device_eval_batch_size": BATCH_SIZE,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    keywords: dict[str, Any] = {"model_init": make} if arguments.pop("from_model_init", False) else {"model": make()}
    return side.Trainer(
        **keywords,
        args=side.TrainingArguments(folder, **{**settings, **arguments}),
        train_dataset=Rows(rows(BATCH_SIZE * STEPS)),
        eval_dataset=Rows(rows(BATCH_SIZE * EVALUATION_BATCHES)),
        data_collator=collator,
        compute_metrics=lambda prediction: {"rows": float(len(prediction.label_ids))},
        callbacks=list(callbacks),
    )


def make_wait_counter(side: Any) -> Any:
    """Return a callback that notes how often the host has waited at each event."""
    from tests.simulated_gpu.measurements import count_waits

    class WaitCounter(side.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.waits: list[tuple[str, int]] = []

    def note(event: str) -> Any:
        def on_event(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.waits.append((event, count_waits()))

        return on_event

    for event in ("on_step_end", "on_log", "on_evaluate"):
        setattr(WaitCounter, event, note(event))
    return WaitCounter()


def waits_of_model(model: str, has_bf16: bool, is_training: bool) -> int:
    """Return how often a micro-batch waits in the model's own forward and backward passes, in plain torch."""
    from tests.simulated_gpu.measurements import count_waits, reset_counts

    make, rows, collator = MODELS[model]
    module = make().cuda().train(is_training)
    batch = (collator or torch.utils.data.default_collate)(rows(BATCH_SIZE))
    batch = {name: value.cuda() for name, value in batch.items()}
    reset_counts()
    with torch.autocast("cuda", torch.bfloat16, has_bf16), torch.set_grad_enabled(is_training):
        loss = module(**batch)["loss"]
    if is_training:
        loss.backward()
    return count_waits()


def measure_training(side: Any, training: Training) -> dict[str, int]:
    """Return the waits of a step, a log and an evaluation, without those of the model itself."""
    from tests.simulated_gpu.measurements import reset_counts

    counter = make_wait_counter(side)
    callbacks: list[Any] = [counter]
    if training.uses_lightnings_loop:
        from lightning.pytorch.callbacks import Callback

        # The fast loop gives way to Lightning's if a callback has a hook that it does not call.
        callbacks.append(type("BatchHook", (Callback,), {"on_before_zero_grad": lambda *args: None})())
    with tempfile.TemporaryDirectory() as folder:
        settings = {"eval_strategy": "steps", "eval_steps": STEPS, **training.arguments}
        trainer = make_trainer(side, training.model, folder, tuple(callbacks), **settings)
        reset_counts()
        trainer.train()
    steps = [count for event, count in counter.waits if event == "on_step_end"]
    between = [
        (first, second, after - before) for (first, before), (second, after) in itertools.pairwise(counter.waits)
    ]
    logs = [waits for first, second, waits in between if (first, second) == ("on_step_end", "on_log")]
    evaluation = next(waits for first, second, waits in between if (first, second) == ("on_log", "on_log"))
    has_bf16 = bool(training.arguments.get("bf16"))
    micro_batches = training.arguments.get("gradient_accumulation_steps", 1)
    of_window = micro_batches * waits_of_model(training.model, has_bf16, True)
    # A step after a log waits for the log too.
    of_steps = [
        after - before for step, (before, after) in enumerate(itertools.pairwise(steps), 1) if step % LOGGING_STEPS
    ]
    return {
        "model": of_window,
        "step": max(of_steps) - of_window,
        "log": max(logs),
        "evaluation": evaluation - EVALUATION_BATCHES * waits_of_model(training.model, has_bf16, False),
    }


def measure_waits(side_name: str) -> dict[str, dict[str, int]]:
    """Return the waits of each training of `TRAININGS` that the side has."""
    side = importlib.import_module(side_name)
    is_ours = side_name == "littrainer"
    return {
        name: measure_training(side, training)
        for name, training in TRAININGS.items()
        if is_ours or not training.uses_lightnings_loop
    }


def train(side: Any, folder: str, model: str = "wide Llama", **arguments: Any) -> Any:
    trainer = make_trainer(side, model, folder, **arguments)
    trainer.train()
    return trainer


def evaluate(side: Any, folder: str) -> Any:
    trainer = make_trainer(side, "wide Llama", folder)
    trainer.evaluate()
    return trainer


def resume(**arguments: Any) -> Callable[[Any, str], Any]:
    def resume_training(side: Any, folder: str) -> Any:
        settings = {"save_strategy": "steps", "save_steps": SAVE_STEPS, **arguments}
        train(side, folder, **settings)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        trainer = make_trainer(side, settings.pop("model", "wide Llama"), folder, **settings)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVE_STEPS}")
        return trainer

    return resume_training


def search(side: Any, folder: str) -> Any:
    trainer = make_trainer(side, "wide Llama", folder, from_model_init=True)
    trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)},
        backend="optuna",
        n_trials=10,
    )
    return trainer


SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": SAVE_STEPS}
BEST: dict[str, Any] = {**SAVES, "eval_strategy": "steps", "eval_steps": SAVE_STEPS, "load_best_model_at_end": True}

MEMORY: dict[str, Callable[[Any, str], Any]] = {
    "training": train,
    "training, bf16": lambda side, folder: train(side, folder, bf16=True),
    "evaluation": evaluate,
    "saving": lambda side, folder: train(side, folder, **SAVES),
    "load_best_model_at_end": lambda side, folder: train(side, folder, **BEST),
    "resume": resume(),
    "resume, fp16 and fused optimizer": resume(fp16=True, optim="adamw_torch_fused"),
    "resume, LoRA": resume(model="BERT with LoRA"),
    "search of ten trials": search,
}
OURS_ALONE: dict[str, Callable[[Any, str], Any]] = {
    "async_save": lambda side, folder: train(side, folder, async_save=True, **SAVES),
    "ema_decay": lambda side, folder: train(side, folder, ema_decay=0.9, **SAVES),
}


def measure_memory(side_name: str) -> dict[str, dict[str, int]]:
    """Return the peak of each entry of `MEMORY` in bytes, and what `del trainer` leaves without garbage collection."""
    from tests.simulated_gpu.measurements import read_memory

    side = importlib.import_module(side_name)
    # Exceptions caught in a library's import stay in cycles with the frames below it, a Trainer's user's among them.
    importlib.import_module("optuna")
    for model in ("wide Llama", "BERT with LoRA"):
        MODELS[model][0]()
    measured = {}
    for name, work in {**MEMORY, **(OURS_ALONE if side_name == "littrainer" else {})}.items():
        gc.collect()
        before = read_memory()["current"]
        torch.cuda.reset_peak_memory_stats()
        gc.disable()
        with tempfile.TemporaryDirectory() as folder:
            trainer = work(side, str(Path(folder)))
        peak = read_memory()["peak"] - before
        del trainer
        measured[name] = {"peak": peak, "left": read_memory()["current"] - before}
        gc.enable()
    return measured


def measure_chunked_loss() -> dict[bool, int]:
    """Return the peak in bytes of a training without and with `chunked_loss`."""
    from tests.simulated_gpu.measurements import read_memory

    side, peaks = importlib.import_module("littrainer"), {}
    for is_chunked in (False, True):
        gc.collect()
        before = read_memory()["current"]
        torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as folder:
            train(side, folder, "Llama with a large vocabulary", max_steps=2, chunked_loss=is_chunked)
        peaks[is_chunked] = read_memory()["peak"] - before
    return peaks


def measure_waits_for_losses() -> dict[str, dict[str, int]]:
    """Return the waits of our trainings with arguments that transformers lacks."""
    trainings = {
        "log_loss_terms": Training("MLP with loss terms", {"log_loss_terms": True}),
        "chunked_loss": Training("Llama", {"chunked_loss": True}),
    }
    side = importlib.import_module("littrainer")
    return {name: measure_training(side, training) for name, training in trainings.items()}
