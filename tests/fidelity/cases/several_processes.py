"""What a training step exchanges between processes: gradients, label tokens, buffers, and what is logged."""

from __future__ import annotations

import os
from typing import Any

import torch

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, vector_rows
from tests.scenarios.models import CountingClassifier, NoisyClassifier, PartlyTrainedClassifier, tiny_gpt2


def build(side: Side, model: Any, kind: Any = None, **changes: Any) -> Any:
    return (kind or side.Trainer)(
        model=model,
        args=side.arguments(**changes),
        train_dataset=Rows(vector_rows(28)),
        eval_dataset=Rows(vector_rows(7, seed=1)),
        callbacks=[side.watcher],
    )


@scenario(processes=2)
def two_processes_with_buffers_of_their_own(side: Side) -> Record:
    return side.train(build(side, NoisyClassifier(), ddp_broadcast_buffers=False))


@scenario(processes=2)
def two_processes_that_look_for_unused_parameters_in_small_buckets(side: Side) -> Record:
    trainer = build(side, PartlyTrainedClassifier(), ddp_find_unused_parameters=True, ddp_bucket_cap_mb=1)
    return side.train(trainer)


@scenario(processes=2)
def two_processes_with_a_graph_that_stays_the_same(side: Side) -> Record:
    return side.train(build(side, CountingClassifier(), ddp_static_graph=True, ddp_find_unused_parameters=False))


@scenario(processes=2)
def two_processes_that_exchange_the_gradients_of_each_batch(side: Side) -> Record:
    each = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return side.train(build(side, NoisyClassifier(), gradient_accumulation_steps=2, accelerator_config=each))


def language_model(side: Side, **changes: Any) -> Record:
    trainer = side.Trainer(
        model=tiny_gpt2(),
        args=side.arguments(gradient_accumulation_steps=2, **changes),
        data_collator=pad_tokens,
        train_dataset=Rows(language_rows(28)),
        callbacks=[side.watcher],
    )
    return side.train(trainer)


@scenario(processes=2)
def two_processes_that_count_label_tokens_together(side: Side) -> Record:
    return language_model(side, include_num_input_tokens_seen="non_padding")


@scenario(processes=2)
def two_processes_that_count_label_tokens_each_for_itself(side: Side) -> Record:
    return language_model(side, average_tokens_across_devices=False, include_num_input_tokens_seen="all")


@scenario(processes=2)
def two_processes_that_end_between_two_logs(side: Side) -> Record:
    return side.train(build(side, NoisyClassifier(), logging_steps=3))


@scenario(processes=2)
def two_processes_of_which_one_reports_losses_that_are_no_numbers(side: Side) -> Record:
    class Reporting(side.Trainer):  # type: ignore[name-defined, misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)
            is_lost = os.environ["RANK"] == "1" and self.state.global_step % 2
            return torch.full_like(loss, float("nan")) if is_lost else loss

    return side.train(build(side, NoisyClassifier(), Reporting, logging_steps=2))


@scenario(processes=2, extra=True)
def two_processes_and_the_model_that_a_subclass_is_handed(side: Side) -> Record:
    handed: list[Any] = []

    class Watching(side.Trainer):  # type: ignore[name-defined, misc]
        def compute_loss(self, model: Any, inputs: Any, **keywords: Any) -> Any:
            inner = self.accelerator.unwrap_model(model)
            handed.append([type(model).__name__, model is self.model_wrapped, inner is self.model, model is self.model])
            return super().compute_loss(model, inputs, **keywords)

    trainer = build(side, NoisyClassifier(), Watching, eval_strategy="epoch", per_device_eval_batch_size=2)
    result = trainer.train()
    kinds = [type(trainer.model).__name__, type(trainer.model_wrapped).__name__]
    return side.record(trainer, result, extra={"handed": handed, "kinds": kinds})
