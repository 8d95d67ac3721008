"""Exchanges of a training step between processes: gradients, label tokens, buffers, and what is logged."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from tests.fidelity.record import Record
from tests.fidelity.registry import Script, add_scripts, scenario
from tests.fidelity.side import Side
from tests.scenarios.data import language_rows
from tests.scenarios.models import CountingClassifier, NoisyClassifier, PartlyTrainedClassifier, tiny_gpt2


def make_vector_script(make_model: Callable[[], Any], **changes: Any) -> Script:
    return lambda side: side.train(side.vector_trainer(make_model(), rows=28, **changes))


def make_token_script(**changes: Any) -> Script:
    return lambda side: side.train(
        side.token_trainer(tiny_gpt2(), language_rows, rows=28, gradient_accumulation_steps=2, **changes)
    )


add_scripts(
    {
        "two_processes_with_buffers_of_their_own": make_vector_script(NoisyClassifier, ddp_broadcast_buffers=False),
        "two_processes_that_look_for_unused_parameters_in_small_buckets": make_vector_script(
            PartlyTrainedClassifier, ddp_find_unused_parameters=True, ddp_bucket_cap_mb=1
        ),
        "two_processes_with_a_graph_that_stays_the_same": make_vector_script(
            CountingClassifier, ddp_static_graph=True, ddp_find_unused_parameters=False
        ),
        "two_processes_that_exchange_the_gradients_of_each_batch": make_vector_script(
            NoisyClassifier,
            gradient_accumulation_steps=2,
            accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        ),
        "two_processes_that_count_label_tokens_together": make_token_script(
            include_num_input_tokens_seen="non_padding"
        ),
        "two_processes_that_count_label_tokens_each_for_itself": make_token_script(
            average_tokens_across_devices=False, include_num_input_tokens_seen="all"
        ),
        "two_processes_that_end_between_two_logs": make_vector_script(NoisyClassifier, logging_steps=3),
    },
    processes=2,
)


@scenario(processes=2)
def two_processes_with_nonfinite_losses_in_a_process(side: Side) -> Record:
    class Reporting(side.Trainer):  # type: ignore[name-defined, misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)
            is_lost = os.environ["RANK"] == "1" and self.state.global_step % 2
            return torch.full_like(loss, float("nan")) if is_lost else loss

    return side.train(side.vector_trainer(NoisyClassifier(), rows=28, kind=Reporting, logging_steps=2))


@scenario(processes=2, extra=True)
def two_processes_and_the_model_that_a_subclass_is_handed(side: Side) -> Record:
    handed: list[Any] = []

    class Watching(side.Trainer):  # type: ignore[name-defined, misc]
        def compute_loss(self, model: Any, inputs: Any, **keywords: Any) -> Any:
            inner = self.accelerator.unwrap_model(model)
            handed.append([type(model).__name__, model is self.model_wrapped, inner is self.model, model is self.model])
            return super().compute_loss(model, inputs, **keywords)

    trainer = side.vector_trainer(
        NoisyClassifier(), rows=28, kind=Watching, eval_strategy="epoch", per_device_eval_batch_size=2
    )
    result = trainer.train()
    kinds = [type(trainer.model).__name__, type(trainer.model_wrapped).__name__]
    return side.record(trainer, result, extra={"handed": handed, "kinds": kinds})
