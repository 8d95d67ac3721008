"""Optuna's trials in several processes: what the first one draws, and whether it prunes, the others receive.

The script's functions ask in all processes, each at its own time; the first one waits for nobody.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist
from optuna.trial import FixedTrial, Trial

from littrainer.distributed.agreement import from_each
from littrainer.distributed.key_value_store import KeyValueStore
from littrainer.search.failures import SearchMistake

Value = TypeVar("Value")
SPACE_IS_ASKED = "littrainer:space is asked"


class TrialFacts(NamedTuple):
    """What is known of a trial when it begins.

    Parameters:
        key: of the posts that its values come by.
    """

    key: str
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


class LeadingTrial(Trial):
    """A study's trial in the process that draws: the trial that it is made of, under another class."""

    posts: KeyValueStore
    facts: TrialFacts
    _told: dict[str, Any]

    def __init__(self, trial: Trial):
        self.__dict__ = trial.__dict__
        study = trial.study
        key = uuid.uuid4().hex
        self.facts = TrialFacts(key, trial.number, trial.user_attrs, study.study_name, study.directions)
        self.posts = KeyValueStore(key)
        self._told = {}
        self._last_reported: int | None = None

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """As `optuna.Trial.suggest_float`."""
        return self._tell(name, super().suggest_float(name, low, high, step=step, log=log))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """As `optuna.Trial.suggest_int`."""
        return self._tell(name, super().suggest_int(name, low, high, step=step, log=log))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """As `optuna.Trial.suggest_categorical`."""
        return self._tell(name, super().suggest_categorical(name, choices))

    def report(self, value: float, step: int) -> None:
        """As `optuna.Trial.report`."""
        super().report(value, step)
        self._last_reported = step

    def should_prune(self) -> bool:
        """As `optuna.Trial.should_prune`, once for each step that was reported."""
        name = pruning_at(self._last_reported)
        return self._told[name] if name in self._told else self._tell(name, super().should_prune())

    def space_is_asked(self, space: Mapping[str, Any]) -> None:
        """The space has returned this in this process.

        Raises:
            SearchMistake: it has returned something else in another one.
        """
        self._tell(SPACE_IS_ASKED, True)
        check_is_the_same(from_each(_comparable(space)))

    def _tell(self, name: str, value: Value) -> Value:
        if name not in self._told:
            self._told[name] = value
            self.posts.post(name, value)
        return value


class FollowingTrial(FixedTrial):
    """The same trial in another process."""

    def __init__(self, facts: TrialFacts):
        self._received: dict[str, Any] = {}
        super().__init__(self._received, facts.number)
        self._posts = KeyValueStore(facts.key)
        self._last_reported: int | None = None
        self._is_in_space = True
        self._prunes: dict[str, bool] = {}
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

    def report(self, value: float, step: int) -> None:
        """Nothing but which step it is; the first process reports the value."""
        self._last_reported = step

    def should_prune(self) -> bool:
        """What the first process decides."""
        name = pruning_at(self._last_reported)
        if name not in self._prunes:
            self._prunes[name] = self._posts.fetch(name, "whether to prune")
        return self._prunes[name]

    def space_is_asked(self, space: Mapping[str, Any]) -> None:
        """The space has returned this in this process.

        Raises:
            SearchMistake: it has returned something else in another one.
        """
        self._is_in_space = False
        check_is_the_same(from_each(_comparable(space)))

    def _receive(self, name: str) -> None:
        if name in self._received:
            return
        what = f"the hyperparameter {name!r} of trial {self.number}"
        try:
            self._received[name] = self._posts.fetch(name, what, SPACE_IS_ASKED if self._is_in_space else None)
        except KeyError:
            raise SearchMistake(
                f"hp_space asks for the hyperparameter {name!r} in process {dist.get_rank()}, and in process 0 it does "
                "not: what it asks for must not depend on the rank."
            ) from None


def check_is_the_same(spaces: Sequence[Mapping[str, str]]) -> None:
    """Refuse a space that depends on the rank.

    Parameters:
        spaces: what it has returned, by rank, with the values as text.

    Raises:
        SearchMistake: two ranks have other names or values.
    """
    first = spaces[0]
    for rank, space in enumerate(spaces):
        for name in sorted({*first, *space}):
            here, there = (one.get(name, "no value") for one in (first, space))
            if here != there:
                raise SearchMistake(
                    f"hp_space returned {here} for {name!r} in process 0, and {there} in process {rank}: what it "
                    "returns must not depend on the rank. Ask the trial for values that are drawn (trial.suggest_...)."
                )


def _comparable(space: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) if _is_plain(value) else _kind_of(value) for name, value in space.items()}


def _is_plain(value: Any) -> bool:
    """Whether equal values have one text, also in different processes."""
    if isinstance(value, Mapping):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, Enum, np.generic))


def _kind_of(value: Any) -> str:
    return f"a {type(value).__qualname__}"


def pruning_at(step: int | None) -> str:
    """The name of the post that says whether to prune."""
    return f"littrainer:prune:{step}"
