"""What a hyperparameter search returns."""

from __future__ import annotations

from typing import Any, NamedTuple


class BestRun(NamedTuple):
    """The best trial of a search, or one of the best where it has several objectives.

    Parameters:
        run_id: the trial's id; its checkpoints lie in `run-<run_id>`, unless `hp_name` names the folder.
        objective: what `compute_objective` returned for it; a list where there are several objectives.
        hyperparameters: what was drawn for it, under the names that the search space gave.
        run_summary: with Ray Tune the `ExperimentAnalysis` of all trials, with Weights & Biases the sweep's id.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any | None = None
