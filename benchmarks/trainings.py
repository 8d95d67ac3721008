"""One training, as each side's users write it, with the same arithmetic: AdamW, clipping to norm 1, a linear schedule.

None logs or saves unless it is asked to. What is timed begins where `Prepared` is called: imports, model, data and the
Trainer stand before.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, default_collate

from .jobs import Job
from .sides import Side

LEARNING_RATE = 1e-3
MAX_NORM = 1.0

Events = Mapping[str, Callable[[], None]]
"""What is called at `step_begin` and `step_end` of each optimizer step, by a callback of the side's own kind."""
Prepared = Callable[[], object]


@dataclass
class Plan:
    """What is trained and for how long.

    Parameters:
        job: The model and the data.
        folder: Where a side may write.
        steps: Optimizer steps.
        batch_size: Samples of a micro-batch, on each process.
        accumulation: Micro-batches of an optimizer step.
        bars: Whether the side shows its own progress bar.
        arguments: Further training arguments, for the sides that take them.
        samples: What is trained on; by default as much as the steps need.
        given: Further keywords of the Trainer.
    """

    job: Job
    folder: str
    steps: int
    batch_size: int = 8
    accumulation: int = 1
    bars: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    samples: Any = None
    trainer_kwargs: dict[str, Any] = field(default_factory=dict)

    def data(self) -> Any:
        if self.samples is not None:
            return self.samples
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        return self.job.samples(self.steps * self.batch_size * self.accumulation * processes)


class StepClock:
    """Time per optimizer step, from the end of the warm-up to the last step that ended.

    Parameters:
        warmup: Steps that do not count.
    """

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.ended: list[tuple[float, float]] = []

    def step_ended(self) -> None:
        self.ended.append((time.perf_counter(), time.process_time()))

    def per_step(self) -> dict[str, float]:
        """Microseconds of a step, by the clock on the wall and of this process's threads."""
        first, last = self.ended[self.warmup - 1], self.ended[-1]
        steps = len(self.ended) - self.warmup
        return {
            "wall_us": (last[0] - first[0]) / steps * 1e6,
            "cpu_us": (last[1] - first[1]) / steps * 1e6,
        }


def prepared_training(side: Side, plan: Plan, events: Events) -> Prepared:
    """All that stands before a training; calling it trains."""
    if side.library == "torch":
        return raw_training(plan, events)
    if side.library == "lightning":
        return lightning_training(plan, events)
    return trainer_training(side.library, plan, events)


def clocked(side: Side, plan: Plan, warmup: int) -> StepClock:
    """Train and tell the time of its steps.

    Raises:
        RuntimeError: the side took another number of steps.
    """
    clock = StepClock(warmup)
    train = prepared_training(side, plan, {"step_end": clock.step_ended})
    with silenced():
        train()
    if len(clock.ended) != plan.steps:
        raise RuntimeError(f"{side.name} took {len(clock.ended)} optimizer steps where {plan.steps} were asked for")
    return clock


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """What a side prints is formatted and written all the same, to memory."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


# ---------------------------------------------------------------- a PyTorch loop


def optimizer_and_schedule(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / steps))
    return optimizer, schedule


def batches(samples: Any, batch_size: int) -> DataLoader[Any]:
    """Shuffled batches; of the own part of the samples where several processes train together."""
    shared = dist.is_initialized() and dist.get_world_size() > 1
    sampler: Any = DistributedSampler(samples, shuffle=True) if shared else None
    return DataLoader(
        samples, batch_size=batch_size, shuffle=sampler is None, sampler=sampler, collate_fn=default_collate
    )


def raw_training(plan: Plan, events: Events) -> Prepared:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    model, loader = plan.job.model(), batches(plan.data(), plan.batch_size)
    if dist.is_initialized() and dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model)
    step_begins, step_ended = events.get("step_begin"), events.get("step_end")

    def train() -> None:
        optimizer, schedule = optimizer_and_schedule(model, plan.steps)
        model.train()
        for number, batch in enumerate(loader, start=1):
            if step_begins and (number - 1) % plan.accumulation == 0:
                step_begins()
            loss = model(**batch)["loss"]
            (loss if plan.accumulation == 1 else loss / plan.accumulation).backward()
            if number % plan.accumulation:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step_ended:
                step_ended()

    return train


# ---------------------------------------------------------------- a LightningModule


def lightning_settings(folder: str, bars: bool = False) -> dict[str, Any]:
    """Keywords of a `lightning.Trainer` that only trains or evaluates."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": bars,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }


def lightning_training(plan: Plan, events: Events) -> Prepared:
    import lightning.pytorch as pl

    inner = plan.job.model()

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = inner

        def training_step(self, batch: dict[str, torch.Tensor], batch_index: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer, schedule = optimizer_and_schedule(self.model, plan.steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    # Only what somebody listens to, since a hook that is there is called.
    hooks: dict[str, Any] = {}
    step_begins, step_ended = events.get("step_begin"), events.get("step_end")
    if step_begins:

        def on_train_batch_start(self: Any, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % plan.accumulation == 0:
                step_begins()

        hooks["on_train_batch_start"] = on_train_batch_start
    if step_ended:

        def on_train_batch_end(self: Any, trainer: Any, module: Any, out: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % plan.accumulation == 0:
                step_ended()

        hooks["on_train_batch_end"] = on_train_batch_end
    probe = type("Probe", (pl.Callback,), hooks)()
    inner.train()
    module, loader = Model(), batches(plan.data(), plan.batch_size)

    def train() -> None:
        trainer = pl.Trainer(
            max_steps=plan.steps,
            gradient_clip_val=MAX_NORM,
            accumulate_grad_batches=plan.accumulation,
            callbacks=[probe],
            **lightning_settings(plan.folder, plan.bars),
        )
        trainer.fit(module, loader)

    return train


# ---------------------------------------------------------------- a Trainer


def trainer_arguments(names: Any, folder: str, **further: Any) -> Any:
    """Training arguments that log, save and show nothing unless asked to."""
    settings: dict[str, Any] = {
        "output_dir": folder,
        "learning_rate": LEARNING_RATE,
        "max_grad_norm": MAX_NORM,
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "dataloader_pin_memory": False,
        "use_cpu": True,
    }
    return names.TrainingArguments(**{**settings, **further})


def trainer_training(library: str, plan: Plan, events: Events) -> Prepared:
    names = importlib.import_module(library)
    arguments = trainer_arguments(
        names,
        plan.folder,
        **{
            "max_steps": plan.steps,
            "per_device_train_batch_size": plan.batch_size,
            "gradient_accumulation_steps": plan.accumulation,
            "disable_tqdm": not plan.bars,
            **plan.arguments,
        },
    )
    trainer = names.Trainer(
        model=plan.job.model(),
        args=arguments,
        train_dataset=plan.data(),
        callbacks=[trainer_probe(names, events)],
        **{"data_collator": default_collate, **plan.trainer_kwargs},
    )
    resumed = arguments.resume_from_checkpoint
    return lambda: trainer.train(resume_from_checkpoint=resumed)


def trainer_probe(names: Any, events: Events) -> Any:
    """A callback that has the events which are listened to, and no others."""

    def hook(called: Callable[[], None]) -> Callable[..., None]:
        return lambda self, args, state, control, **_: called()

    return type("Probe", (names.TrainerCallback,), {f"on_{event}": hook(called) for event, called in events.items()})()
