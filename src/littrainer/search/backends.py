"""The libraries that can drive a search, by name; a script may add its own backend to the table."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from littrainer.arguments.choices import HPSearchBackend
from littrainer.arguments.did_you_mean import suggestion
from littrainer.errors.notes import kind_of
from littrainer.search.parameters import default_hp_space_optuna, default_hp_space_ray, default_hp_space_wandb
from littrainer.search.record import BestRun


class HyperParamSearchBackendBase:
    """A library that drives a search; derive from it and enter the class in `ALL_HYPERPARAMETER_SEARCH_BACKENDS`.

    Attributes:
        name: what `backend=` calls it.
        pip_package: what is installed for it; None if that is its name.
    """

    name: str
    pip_package: str | None = None

    @staticmethod
    def is_available() -> bool:
        """Return whether the library is installed."""
        raise NotImplementedError("A backend has to say whether it is available.")

    def run(self, trainer: Any, n_trials: int, direction: Any, **kwargs: Any) -> BestRun | list[BestRun] | None:
        """Carry out the search and return the best trial."""
        raise NotImplementedError(f"{type(self).__name__} has to define run().")

    def default_hp_space(self, trial: Any) -> dict[str, Any]:
        """Return the space of a search for which no `hp_space` is given."""
        raise NotImplementedError(f"{type(self).__name__} has no default space: pass hp_space.")

    def ensure_available(self) -> None:
        """Raise a RuntimeError that says what to install, unless the library is there."""
        if not self.is_available():
            raise RuntimeError(f"backend={self.name!r} is not installed: run {self.pip_install()}.")

    @classmethod
    def pip_install(cls) -> str:
        """Return the command that installs the library."""
        return f"`pip install {cls.pip_package or cls.name}`"


class _LibraryBackend(HyperParamSearchBackendBase):
    modules: tuple[str, ...]
    function: str

    @classmethod
    def is_available(cls) -> bool:
        """Return whether the library is installed."""
        return all(find_spec(name) is not None for name in cls.modules)

    def run(self, trainer: Any, n_trials: int, direction: Any, **kwargs: Any) -> BestRun | list[BestRun] | None:
        """Carry out the search; the keywords are the library's."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)(trainer, n_trials, direction, **kwargs)


class OptunaBackend(_LibraryBackend):
    """Optuna: trials one after the other in this process, or `n_jobs` at once in several.

    A search takes the keywords of `create_study` and `Study.optimize`.
    """

    name = "optuna"
    modules = ("optuna",)
    function = "littrainer.search.optuna_backend:run_hp_search_optuna"
    default_hp_space = staticmethod(default_hp_space_optuna)


class RayTuneBackend(_LibraryBackend):
    """Ray Tune: trials at once in several processes, on one machine or several.

    A search takes the keywords of `ray.tune.run`.
    """

    name = "ray"
    pip_package = "'ray[tune]'"
    modules = ("ray", "ray.tune")
    function = "littrainer.search.ray_backend:run_hp_search_ray"
    default_hp_space = staticmethod(default_hp_space_ray)


class WandbBackend(_LibraryBackend):
    """Weights & Biases: a sweep whose agent runs in this process.

    A search takes `sweep_id`, `project`, `name`, `entity` and `metric`.
    """

    name = "wandb"
    modules = ("wandb",)
    function = "littrainer.search.wandb_sweep:run_hp_search_wandb"
    default_hp_space = staticmethod(default_hp_space_wandb)


ALL_HYPERPARAMETER_SEARCH_BACKENDS: dict[Any, type[HyperParamSearchBackendBase]] = {
    HPSearchBackend(backend.name): backend for backend in (OptunaBackend, RayTuneBackend, WandbBackend)
}
"""Member of HPSearchBackend, or the name of a script's own backend -> its class; the first that is there is default."""


def default_hp_search_backend() -> str:
    """Return the name of the first backend that is installed."""
    known = ALL_HYPERPARAMETER_SEARCH_BACKENDS.values()
    installed = [backend.name for backend in known if backend.is_available()]
    if not installed:
        ways = "; ".join(f"{backend.pip_install()} for {backend.name}" for backend in known)
        raise RuntimeError(f"hyperparameter_search needs a library that drives it, and none is installed: {ways}.")
    return installed[0]


def chosen_backend(backend: Any) -> tuple[Any, HyperParamSearchBackendBase]:
    """Return the backend that `backend=` names.

    Returns:
        its key in the table (a member of HPSearchBackend, or the name of a script's own), and the backend.

    Raises:
        TypeError, ValueError: there is none of that name.
        RuntimeError: it is not installed.
    """
    wanted = default_hp_search_backend() if backend is None else getattr(backend, "value", backend)
    if not isinstance(wanted, str):
        raise TypeError(f"backend={backend!r} is {kind_of(backend)}; give the name of one, such as 'optuna'.")
    by_name = {getattr(key, "value", key): key for key in ALL_HYPERPARAMETER_SEARCH_BACKENDS}
    if wanted not in by_name:
        raise ValueError(f"backend={wanted!r} is not known ({suggestion(str(wanted), by_name)}).")
    key = by_name[wanted]
    found = ALL_HYPERPARAMETER_SEARCH_BACKENDS[key]()
    found.ensure_available()
    return key, found
