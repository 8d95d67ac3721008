"""The libraries that can run a search, by name; a script may add a backend to the table."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import HPSearchBackend
from littrainer.arguments.did_you_mean import suggest_name
from littrainer.runtime.notes import kind_of
from littrainer.search.parameters import default_hp_space_optuna, default_hp_space_ray, default_hp_space_wandb
from littrainer.search.record import BestRun

if TYPE_CHECKING:
    from littrainer.callbacks.trainer_context import TrainerContext


class HyperParamSearchBackendBase:
    """A library that runs a search; derive from it and enter the class in `ALL_HYPERPARAMETER_SEARCH_BACKENDS`.

    Attributes:
        name: its name in `backend=`.
        pip_package: the package to install; None if it equals the name.
        modules: the modules that have to be installed.
        function: "module:function" that `run` calls.
    """

    name: str
    pip_package: str | None = None
    modules: tuple[str, ...] = ()
    function: str

    @classmethod
    def is_available(cls) -> bool:
        return all(find_spec(name) is not None for name in cls.modules)

    def run(
        self, trainer: TrainerContext, n_trials: int, direction: Any, **kwargs: Any
    ) -> BestRun | list[BestRun] | None:
        """Run the search and return the best trial."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)(trainer, n_trials, direction, **kwargs)

    def default_hp_space(self, trial: Any) -> dict[str, Any]:
        """Return the space of a search without `hp_space`."""
        raise NotImplementedError(f"{type(self).__name__} has no default space: pass hp_space.")

    def ensure_available(self) -> None:
        if not self.is_available():
            raise RuntimeError(f"backend={self.name!r} is not installed: run {self.pip_install()}.")

    @classmethod
    def pip_install(cls) -> str:
        return f"`pip install {cls.pip_package or cls.name}`"


class OptunaBackend(HyperParamSearchBackendBase):
    """Optuna, with the keywords of `create_study` and `Study.optimize`; `n_jobs` trials run in parallel processes."""

    name = "optuna"
    modules = ("optuna",)
    function = "littrainer.search.optuna_backend:run_hp_search_optuna"
    default_hp_space = staticmethod(default_hp_space_optuna)


class RayTuneBackend(HyperParamSearchBackendBase):
    """Ray Tune, with the keywords of `ray.tune.run`; trials run in parallel processes, on any number of machines."""

    name = "ray"
    pip_package = "'ray[tune]'"
    modules = ("ray", "ray.tune")
    function = "littrainer.search.ray_backend:search_with_ray"
    default_hp_space = staticmethod(default_hp_space_ray)


class WandbBackend(HyperParamSearchBackendBase):
    """A sweep of Weights & Biases, with `sweep_id`, `project`, `name`, `entity` and `metric`; its agent runs here."""

    name = "wandb"
    modules = ("wandb",)
    function = "littrainer.search.wandb_sweep:run_hp_search_wandb"
    default_hp_space = staticmethod(default_hp_space_wandb)


def run_hp_search_ray(trainer: TrainerContext, n_trials: int, direction: Any, **kwargs: Any) -> Any:
    return RayTuneBackend().run(trainer, n_trials, direction, **kwargs)


ALL_HYPERPARAMETER_SEARCH_BACKENDS: dict[Any, type[HyperParamSearchBackendBase]] = {
    HPSearchBackend(backend.name): backend for backend in (OptunaBackend, RayTuneBackend, WandbBackend)
}
"""Member of HPSearchBackend, or name of a script's backend -> its class; the first installed backend is the default."""


def default_hp_search_backend() -> str:
    backends = ALL_HYPERPARAMETER_SEARCH_BACKENDS.values()
    for backend in backends:
        if backend.is_available():
            return backend.name
    commands = "; ".join(f"{backend.pip_install()} for {backend.name}" for backend in backends)
    raise RuntimeError(f"hyperparameter_search needs a library that runs it, and none is installed: {commands}.")


def find_backend(name_or_member: Any) -> tuple[Any, HyperParamSearchBackendBase]:
    """Return the key of an installed backend in the table, and the backend."""
    name = default_hp_search_backend() if name_or_member is None else getattr(name_or_member, "value", name_or_member)
    if not isinstance(name, str):
        raise TypeError(f"backend={name!r} is {kind_of(name)}; give a name, such as 'optuna'.")
    keys = {getattr(key, "value", key): key for key in ALL_HYPERPARAMETER_SEARCH_BACKENDS}
    if name not in keys:
        raise ValueError(f"backend={name!r} is not known ({suggest_name(str(name), keys)}).")
    backend = ALL_HYPERPARAMETER_SEARCH_BACKENDS[keys[name]]()
    backend.ensure_available()
    return keys[name], backend
