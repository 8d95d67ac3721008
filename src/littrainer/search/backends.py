"""The libraries that can drive a search, by name; a script may put a backend of its own into the table."""

from __future__ import annotations

import importlib
import logging
from importlib.util import find_spec
from typing import Any

from littrainer.arguments.choices import HPSearchBackend
from littrainer.arguments.did_you_mean import suggestion
from littrainer.errors.notes import kind_of
from littrainer.search.parameters import default_hp_space_optuna, default_hp_space_ray, default_hp_space_wandb
from littrainer.search.record import BestRun

logger = logging.getLogger(__name__)


class HyperParamSearchBackendBase:
    """A library that drives a search; derive from it and enter the class in `ALL_HYPERPARAMETER_SEARCH_BACKENDS`.

    Attributes:
        name: what `backend=` calls it.
        pip_package: what is installed for it; None where that is its name.
    """

    name: str
    pip_package: str | None = None

    @staticmethod
    def is_available() -> bool:
        """Whether the library is installed."""
        raise NotImplementedError("A backend has to say whether it is available.")

    def run(self, trainer: Any, n_trials: int, direction: Any, **kwargs: Any) -> BestRun | list[BestRun] | None:
        """Carry out the search and return the best trial."""
        raise NotImplementedError(f"{type(self).__name__} has to define run().")

    def default_hp_space(self, trial: Any) -> dict[str, Any]:
        """The space of a search for which no `hp_space` is given."""
        raise NotImplementedError(f"{type(self).__name__} has no default space: pass hp_space.")

    def ensure_available(self) -> None:
        """See that the library is installed.

        Raises:
            RuntimeError: it is not; the error says what to install.
        """
        if not self.is_available():
            raise RuntimeError(f"backend={self.name!r} is not installed: run {self.pip_install()}.")

    @classmethod
    def pip_install(cls) -> str:
        """The command that installs the library."""
        return f"`pip install {cls.pip_package or cls.name}`"


class _LibraryBackend(HyperParamSearchBackendBase):
    modules: tuple[str, ...]
    function: str

    @classmethod
    def is_available(cls) -> bool:
        """Whether the library is installed."""
        return all(find_spec(name) is not None for name in cls.modules)

    def run(self, trainer: Any, n_trials: int, direction: Any, **kwargs: Any) -> BestRun | list[BestRun] | None:
        """Carry out the search; the keywords are those of the library."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)(trainer, n_trials, direction, **kwargs)


class OptunaBackend(_LibraryBackend):
    """Optuna: trials one after the other in this process, or `n_jobs` at once in several.

    The keywords of a search are those of `create_study` and `Study.optimize`.
    """

    name = "optuna"
    pip_package = "'littrainer[tune]'"
    modules = ("optuna",)
    function = "littrainer.search.optuna_backend:run_hp_search_optuna"
    default_hp_space = staticmethod(default_hp_space_optuna)


class RayTuneBackend(_LibraryBackend):
    """Ray Tune: trials at once in several processes, on one machine or several.

    The keywords of a search are those of `ray.tune.run`.
    """

    name = "ray"
    pip_package = "'littrainer[tune]'"
    modules = ("ray", "ray.tune")
    function = "littrainer.search.ray_backend:run_hp_search_ray"
    default_hp_space = staticmethod(default_hp_space_ray)


class WandbBackend(_LibraryBackend):
    """Weights & Biases: a sweep whose agent runs in this process.

    The keywords are `sweep_id`, `project`, `name`, `entity` and `metric`.
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
    """The name of the first backend that is installed.

    Raises:
        RuntimeError: none is.
    """
    known = ALL_HYPERPARAMETER_SEARCH_BACKENDS.values()
    installed = [backend.name for backend in known if backend.is_available()]
    if not installed:
        ways = "; ".join(f"{backend.pip_install()} for {backend.name}" for backend in known)
        raise RuntimeError(f"hyperparameter_search needs a library that drives it, and none is installed: {ways}.")
    if len(installed) > 1:
        logger.info("Of the installed search backends, %s, the first one is taken.", ", ".join(installed))
    return installed[0]


def chosen_backend(backend: Any) -> tuple[Any, HyperParamSearchBackendBase]:
    """The backend that `backend=` names.

    Returns:
        its key in the table, which for those known by name is a member of HPSearchBackend, and the backend.

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
