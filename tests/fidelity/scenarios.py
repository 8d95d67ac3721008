"""All scenarios by name, and which of them are compared today."""

from __future__ import annotations

from tests.fidelity.cases import (  # noqa: F401 (importing them registers their scenarios)
    accelerator,
    accumulation,
    best_model,
    callbacks,
    collating,
    data,
    evaluation,
    evaluation_alone,
    evaluation_outputs,
    event_order,
    formats,
    lengths,
    model_side,
    models,
    optimization,
    orders_of_calls,
    overrides,
    overriding,
    precision,
    replacing,
    reports,
    resume,
    resume_changed,
    sampling,
    saving,
    search,
    search_overrides,
    seq2seq,
    several_processes,
    several_processes_accelerator,
    several_processes_data,
    several_processes_saving,
    several_processes_search,
)
from tests.fidelity.registry import REGISTERED, Scenario
from tests.fidelity.side import MODES

SCENARIOS: dict[str, Scenario] = dict(REGISTERED)

COMPARED: tuple[str, ...] = tuple(name for name, scenario in SCENARIOS.items() if scenario.processes == 1)

IN_BOTH_MODES = ("accumulation", "optimization", "precision", "resume")
"""Topics, by the names of their files, whose arithmetic differs most between the modes."""


def _quick() -> set[tuple[str, str]]:
    first = {SCENARIOS[name].run.__module__.rpartition(".")[2]: name for name in reversed(COMPARED)}
    return {
        (name, mode) for topic, name in first.items() for mode in MODES if mode == MODES[0] or topic in IN_BOTH_MODES
    }


QUICK = _quick()
"""What `make test` compares, by scenario and mode: one of each topic."""
