"""Optuna's pruners whose decisions a test knows beforehand."""

from __future__ import annotations

from typing import Any


def prunes_the_second_trial() -> Any:
    """A pruner that ends the trial of number 1 at its first evaluation, and no other."""
    import optuna

    class Second(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return trial.number == 1

    return Second()
