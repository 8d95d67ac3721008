"""An Optuna trial, and its study, in the process that carries the trial out: each call is made where the study is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import optuna

# Asks the other side: whether the study is meant, the attribute, whether it is called, and with what.
Ask = Callable[[bool, str, bool, tuple[Any, ...], dict[str, Any]], Any]
# Protected names that integrations of Optuna read.
ALSO_FORWARDED = {"_trial_id", "_study_id", "_is_multi_objective"}


def _forwarding(of_study: bool, name: str, member: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._ask(of_study, name, True, args, kwargs)

    def get(self: Any) -> Any:
        return self._ask(of_study, name, False, (), {})

    return call if inspect.isfunction(member) else property(get)


def _forwarders(of: type, of_study: bool) -> dict[str, Any]:
    """All that a class offers, as members that ask the other side."""
    names = {name for name in dir(of) if not name.startswith("_")}
    return {
        name: _forwarding(of_study, name, inspect.getattr_static(of, name, None))
        for name in names | (ALSO_FORWARDED & set(dir(of)))
    }


class DistantStudy(optuna.Study):
    """A study that lies in another process; attributes that are no methods are copies.

    Parameters:
        ask: asks the other side.
    """

    def __init__(self, ask: Ask):
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        # What a study sets in its constructor.
        if name.startswith("_") and name not in ALSO_FORWARDED:
            raise AttributeError(name)
        return self._ask(True, name, False, (), {})

    def __getstate__(self) -> Any:
        raise TypeError("A study that lies in another process cannot be pickled.")


class DistantTrial(optuna.Trial):
    """A trial whose study lies in another process: what it suggests, keeps and decides comes from there.

    Parameters:
        number: of the trial.
        ask: asks the other side.
    """

    def __init__(self, number: int, ask: Ask):
        self._number = number
        self._ask = ask
        self.study = DistantStudy(ask)

    @property
    def number(self) -> int:
        """Number of the trial."""
        return self._number

    @property
    def _trial_id(self) -> int:  # type: ignore[override]
        return self._ask(False, "_trial_id", False, (), {})

    def __getstate__(self) -> Any:
        raise TypeError("A trial whose study lies in another process cannot be pickled.")


for _owner, _of_study in ((DistantTrial, False), (DistantStudy, True)):
    for _name, _member in _forwarders(_owner.__mro__[1], _of_study).items():
        if _name not in vars(_owner):
            setattr(_owner, _name, _member)
