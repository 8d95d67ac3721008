"""Trainings that are compared with transformers' on a GPU: `python -m tests.gpu.trainings SIDE NAME FOLDER`.

Each takes its classes from a side, runs on the arguments' device, and returns plain values; the process
writes them to `FOLDER/RANK.pickle`. The same functions run on the CPU in `test_on_the_cpu.py`.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows
from tests.scenarios.models import tiny_llama

STEPS = 8
# Steps at the beginning in which kernels and buffers are set up.
STEPS_OF_SETTING_UP = 2
MANY_EVALUATIONS = 20
# A profiler's name for the steps in which calls that wait are counted, and these calls.
PROFILED_BLOCK = "profiled block"
WAITING_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
# Keywords of the arguments that switch a precision on.
PRECISIONS: dict[str, dict[str, bool]] = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}
# Distribution of the model over two processes -> its arguments.
SPREAD: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp 2": {"fsdp": True, "fsdp_config": {"reshard_after_forward": True}},
    "fsdp 1": {
        "fsdp": True,
        "fsdp_config": {"version": 1, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    },
    "tensor parallel": {"parallelism_config": {"tp_size": 2}, "per_device_train_batch_size": 4},
    "sequence parallel": {"parallelism_config": {"sp_size": 2}, "per_device_train_batch_size": 4},
    "context parallel, fsdp 2": {"fsdp": True, "parallelism_config": {"cp_size": 2}, "per_device_train_batch_size": 4},
    "deepspeed stage 2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
    "deepspeed stage 3": {"deepspeed": {"zero_optimization": {"stage": 3}}},
}
# Keys of a DeepSpeed configuration that the arguments fill in.
FILLED_BY_ARGUMENTS = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
SIDES = {"ours": "littrainer", "theirs": "transformers"}


def trainer_of(side: ModuleType, folder: Path, callbacks: Any = (), kind: Any = None, **changes: Any) -> Any:
    """Return a side's Trainer over a small language model, equal on each call.

    Parameters:
        side: where its classes come from.
        kind: the Trainer's class; by default that of the side.
        changes: arguments on top of these.
    """
    torch.manual_seed(0)
    model = tiny_llama(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    arguments = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **changes,
    }
    return (side.Trainer if kind is None else kind)(
        model=model,
        args=side.TrainingArguments(**arguments),
        train_dataset=Rows(language_rows(64)),
        data_collator=pad_tokens,
        callbacks=list(callbacks),
    )


def curve(trainer: Any) -> list[dict[str, float]]:
    """Losses, gradient norms and learning rates that a training has logged."""
    names = ("loss", "grad_norm", "learning_rate")
    return [{name: float(log[name]) for name in names} for log in trainer.state.log_history if "loss" in log]


def training_in(precision: str) -> Callable[..., Any]:
    """Return a training in a precision."""

    def train(side: ModuleType, folder: Path, **changes: Any) -> Any:
        trainer = trainer_of(side, folder, **PRECISIONS[precision], **changes)
        trainer.train()
        return curve(trainer)

    return train


def overflowing(side: ModuleType, folder: Path, **changes: Any) -> Any:
    """Curves of trainings in fp16, by optimizer, whose first step overflows, so that the scaler skips it."""
    curves = {}
    for optimizer in ("adamw_torch", "adamw_torch_fused"):
        trainer = trainer_of(side, folder, optim=optimizer, max_grad_norm=0.0, **PRECISIONS["fp16"], **changes)
        with torch.no_grad():
            trainer.model.lm_head.weight *= 20
        trainer.train()
        curves[optimizer] = curve(trainer)
    return curves


@contextmanager
def syncs_profiled(results: list[str]) -> Iterator[None]:
    """Collect the calls of the CUDA runtime within the block by which the host waits for the GPU."""
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiler:  # noqa: SIM117
        # The profiler waits for the GPU as well, when it stops.
        with torch.profiler.record_function(PROFILED_BLOCK):
            yield
    results += calls_that_wait(profiler.events())


def calls_that_wait(events: Iterable[Any]) -> list[str]:
    """Names of the calls in `WAITING_CALLS` that began within the profiled block, of a profiler's events."""
    events = list(events)
    blocks = [event.time_range for event in events if event.name == PROFILED_BLOCK]
    return [
        event.name
        for event in events
        if event.name in WAITING_CALLS and any(span.start <= event.time_range.start <= span.end for span in blocks)
    ]


def count_waits_in_steps(side: ModuleType, folder: Path, **changes: Any) -> Any:
    """Return the calls at which the host waited within two whole steps."""
    results: list[str] = []
    steps: list[int] = []

    class Watcher(side.TrainerCallback):  # type: ignore[name-defined]
        block: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == STEPS_OF_SETTING_UP:
                self.block = syncs_profiled(results)
                self.block.__enter__()
            elif self.block is not None:
                steps.append(state.global_step)
                if len(steps) == 2:
                    self.block.__exit__(None, None, None)
                    self.block = None

    settings = {"logging_steps": 1000, "accelerator_config": {"non_blocking": True}, **changes}
    trainer_of(side, folder, [Watcher()], **settings).train()
    return {"steps": steps, "waits": results}


def evaluating_batches(side: ModuleType, folder: Path, **changes: Any) -> Any:
    """The batches of a training and its evaluations, as steps get them, one epoch long.

    Returns:
        for each `non_blocking`, the devices of the tensors, and their values in the order of the steps. They are read
        after further work was queued, so that memory that is given away too early shows.
    """
    results: dict[bool, Any] = {}
    for non_blocking in (False, True):
        drawn: list[dict[str, torch.Tensor]] = []

        class Noting(side.Trainer):  # type: ignore[name-defined]
            def compute_loss(self, model: Any, inputs: Any, *args: Any, drawn: Any = drawn, **kwargs: Any) -> Any:
                # In the stream of the step, in which the batch has to have arrived.
                drawn.append({name: value.clone() for name, value in inputs.items()})
                return super().compute_loss(model, inputs, *args, **kwargs)

        settings = {"accelerator_config": {"non_blocking": non_blocking}, "max_steps": 4, **changes}
        trainer = trainer_of(side, folder, kind=Noting, **settings)
        trainer.eval_dataset = Rows(language_rows(10))
        trainer.train()
        trainer.evaluate()
        devices = sorted({value.device.type for batch in drawn for value in batch.values()})
        values = [{name: value.tolist() for name, value in batch.items()} for batch in drawn]
        results[non_blocking] = {"devices": devices, "batches": values}
    return results


def reserved_by_evaluations(side: ModuleType, folder: Path, **changes: Any) -> Any:
    """Most bytes of the GPU that the allocator has taken after two and after many evaluations; 0 without a GPU."""
    trainer = trainer_of(side, folder, **changes)
    rows = Rows(language_rows(16))
    durations = []
    for evaluations in (2, MANY_EVALUATIONS):
        for _ in range(evaluations):
            trainer.evaluate(rows)
        durations.append(torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0)
    return durations


def peak_memory(side: ModuleType, folder: Path, **changes: Any) -> Any:
    """Most bytes of the GPU that tensors have taken in a training; 0 without a GPU."""
    trainer = trainer_of(side, folder, bf16=True, **changes)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def spread(name: str) -> Callable[..., Any]:
    """A training, saved, by several processes that share the model, in the way of `SPREAD`."""

    def train(side: ModuleType, folder: Path, **changes: Any) -> Any:
        arguments = dict(SPREAD[name])
        if "deepspeed" in arguments:
            arguments["deepspeed"] = {**FILLED_BY_ARGUMENTS, **arguments["deepspeed"]}
        trainer = trainer_of(side, folder / "run", **{"per_device_train_batch_size": 2, **arguments, **changes})
        trainer.train()
        trainer.save_model(str(folder / "saved"))
        return curve(trainer)

    return train


TRAININGS: dict[str, Callable[..., Any]] = {
    **{precision: training_in(precision) for precision in PRECISIONS},
    "overflowing": overflowing,
    "waits in whole steps": count_waits_in_steps,
    "batches": evaluating_batches,
    "memory reserved by evaluations": reserved_by_evaluations,
    "peak memory": peak_memory,
    **{name: spread(name) for name in SPREAD},
}


def main(side: str, name: str, folder: Path) -> None:
    results = TRAININGS[name](importlib.import_module(SIDES[side]), folder)
    (folder / f"{os.environ.get('RANK', '0')}.pickle").write_bytes(pickle.dumps(results))
    if side == "theirs" and "RANK" not in os.environ:
        # Threads of transformers' loaders may still pin batches, and would abort the interpreter's shutdown.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
