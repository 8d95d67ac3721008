"""All scenarios by name, and which of them are compared today."""

from __future__ import annotations

from tests.fidelity.cases import (  # noqa: F401 (importing them registers their scenarios)
    accumulation,
    callbacks,
    data,
    evaluation,
    lengths,
    models,
    optimization,
    resume,
    saving,
)
from tests.fidelity.registry import REGISTERED, Scenario

SCENARIOS: dict[str, Scenario] = dict(REGISTERED)

RESUME_SCENARIOS: tuple[str, ...] = tuple(name for name, scenario in SCENARIOS.items() if scenario.resumes)

COMPARE_RESUME = True
"""Whether the resume scenarios are compared too."""

REFUSED_TODAY: dict[str, str] = {
    "bf16_mixed_precision": "bf16",
    "grouped_by_length": "train_sampling_strategy",
    "label_smoothing": "label_smoothing_factor",
    "optimizer_adafactor": "optim",
    "schedule_cosine_warmup_with_min_lr": "lr_scheduler_type",
    "schedule_cosine_with_min_lr": "lr_scheduler_type",
    "schedule_reduce_lr_on_plateau": "lr_scheduler_type",
    "schedule_warmup_stable_decay": "lr_scheduler_type",
}
"""Scenarios that use an argument we do not carry out yet -> that argument. Such a run has to name it and stop; the
test of that fails when the argument is carried out, and its entry goes."""

COMPARED: tuple[str, ...] = tuple(
    name
    for name, scenario in SCENARIOS.items()
    if name not in REFUSED_TODAY and (COMPARE_RESUME or not scenario.resumes)
)
