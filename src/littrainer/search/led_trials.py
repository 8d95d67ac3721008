"""Optuna's trials in several processes: what the first one draws, and whether it prunes, the others receive.

The methods are called in all processes, in one order, as the script's functions call them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from optuna.trial import FixedTrial, Trial

from littrainer.processes.agreement import failing_together, from_first
from littrainer.search.failures import SearchMistake

Value = TypeVar("Value")


class TrialFacts(NamedTuple):
    """What is known of a trial when it begins."""

    number: int
    user_attrs: dict[str, Any]
    study_name: str
    directions: list[Any]


class FollowedStudy:
    """What a process knows of the study that lies in another one."""

    def __init__(self, study_name: str, directions: list[Any]):
        self.study_name = study_name
        self.directions = directions

    @property
    def direction(self) -> Any:
        """The direction of a study with one objective."""
        if self._is_multi_objective():
            raise RuntimeError("A study with several objectives has directions, and no direction.")
        return self.directions[0]

    def _is_multi_objective(self) -> bool:
        return len(self.directions) > 1

    def stop(self) -> None:
        """Nothing: the process that has the study stops it."""


def facts_about(trial: Trial) -> TrialFacts:
    """What the other processes make their trial of."""
    return TrialFacts(trial.number, trial.user_attrs, trial.study.study_name, trial.study.directions)


class LeadingTrial(Trial):
    """A study's trial in the process that draws; it is the trial that it is made of, under another class."""

    _told: set[str]

    def __init__(self, trial: Trial):
        self.__dict__ = trial.__dict__
        self._told = set()

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """As `optuna.Trial.suggest_float`."""
        return self._tell(name, lambda: Trial.suggest_float(self, name, low, high, step=step, log=log))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """As `optuna.Trial.suggest_int`."""
        return self._tell(name, lambda: Trial.suggest_int(self, name, low, high, step=step, log=log))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """As `optuna.Trial.suggest_categorical`."""
        return self._tell(name, lambda: Trial.suggest_categorical(self, name, choices))

    def should_prune(self) -> bool:
        """As `optuna.Trial.should_prune`, and the others do the same."""
        with failing_together("asking whether to prune"):
            prunes = Trial.should_prune(self)
        return from_first(prunes)

    def _tell(self, name: str, draw: Callable[[], Value]) -> Value:
        # A value that all know may be asked for in one process only, as for the name of a folder.
        if name in self._told:
            return draw()
        with failing_together(f"drawing the hyperparameter {name!r}"):
            value = draw()
        from_first((name, value))
        self._told.add(name)
        return value


class FollowingTrial(FixedTrial):
    """The same trial in another process."""

    def __init__(self, facts: TrialFacts):
        self._received: dict[str, Any] = {}
        super().__init__(self._received, facts.number)
        self.study = FollowedStudy(facts.study_name, facts.directions)
        for name, value in facts.user_attrs.items():
            self.set_user_attr(name, value)

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """The value that the first process has drawn."""
        self._receive(name)
        return super().suggest_float(name, low, high, step=step, log=log)

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """The value that the first process has drawn."""
        self._receive(name)
        return super().suggest_int(name, low, high, step=step, log=log)

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """The value that the first process has drawn."""
        self._receive(name)
        return super().suggest_categorical(name, choices)

    def should_prune(self) -> bool:
        """What the first process decides."""
        with failing_together("asking whether to prune"):
            pass
        return from_first(False)

    def _receive(self, name: str) -> None:
        if name in self._received:
            return
        with failing_together(f"drawing the hyperparameter {name!r}"):
            pass
        drawn, value = from_first(("", None))
        if drawn != name:
            raise SearchMistake(
                f"This process asks trial {self.number} for the hyperparameter {name!r}, and process 0 for {drawn!r}. "
                "hp_space and model_init have to ask for the same ones in the same order in all processes."
            )
        self._received[name] = value
