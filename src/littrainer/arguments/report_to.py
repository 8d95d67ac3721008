"""Values of `report_to`: the table of experiment trackers, whether each is installed, and loggers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import Any, NamedTuple

from littrainer.arguments.did_you_mean import suggest_name
from littrainer.runtime.lazy_isinstance import is_a


def is_enabled_in_environment(name: str) -> bool:
    """Whether an environment variable is set to 1, on, yes or true."""
    # The words of transformers' own callbacks.
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")


class Service(NamedTuple):
    """An experiment tracker.

    Parameters:
        callback: the callback that reports to it, as "module:class" within `littrainer.tracking`.
        modules: what has to be importable; of a tuple, one module is enough.
        install: the arguments of `pip install`.
        about: the service and what is written to it, in half a sentence.
        switch: the environment variable that switches it off.
        in_all: whether `report_to="all"` includes it.
    """

    callback: str
    modules: tuple[str | tuple[str, ...], ...]
    install: str
    about: str
    switch: str | None = None
    in_all: bool = True

    def get_disabled_reason(self) -> str | None:
        """Return why it is not used although its package is installed; None if it is used."""
        if self.switch is None or not is_enabled_in_environment(self.switch):
            return None
        return f"the environment variable {self.switch} switches it off"


def _by_transformers(callback: str, module: str, install: str, about: str) -> Service:
    """Return a service that transformers' own callback reports to."""
    return Service(f"transformers_callbacks:{callback}", (module, "transformers"), f"{install} transformers", about)


# In the order in which `report_to="all"` names them.
SERVICES: dict[str, Service] = {
    "azure_ml": _by_transformers("AzureMLCallback", "azureml.core.run", "azureml-core", "Azure Machine Learning"),
    "comet_ml": _by_transformers("CometCallback", "comet_ml", '"comet-ml>=3.43.2"', "Comet"),
    "dagshub": Service(
        "transformers_callbacks:DagsHubCallback",
        ("dagshub", "mlflow", "transformers"),
        "dagshub mlflow transformers",
        "DagsHub, by MLflow",
    ),
    "dvclive": _by_transformers("DVCLiveCallback", "dvclive", "dvclive", "DVCLive"),
    "mlflow": Service("mlflow:MLflowCallback", ("mlflow",), "mlflow", "MLflow", "DISABLE_MLFLOW_INTEGRATION"),
    "neptune": _by_transformers("NeptuneCallback", "neptune", "neptune", "Neptune"),
    "tensorboard": Service(
        "tensorboard:TensorBoardCallback", (("tensorboard", "tensorboardX"),), "tensorboard", "TensorBoard event files"
    ),
    "wandb": Service("wandb:WandbCallback", ("wandb",), "wandb", "Weights & Biases", "WANDB_DISABLED"),
    "codecarbon": _by_transformers("CodeCarbonCallback", "codecarbon", "codecarbon", "CodeCarbon emissions"),
    "clearml": _by_transformers("ClearMLCallback", "clearml", "clearml", "ClearML"),
    "swanlab": _by_transformers("SwanLabCallback", "swanlab", "swanlab", "SwanLab"),
    "trackio": Service("trackio:TrackioCallback", ("trackio",), "trackio", "Trackio"),
    "kubeflow": Service(
        "transformers_callbacks:KubeflowCallback",
        ("transformers",),
        '"transformers>=5.23"',
        "Kubeflow Trainer, in a TrainJob",
        "DISABLE_KUBEFLOW_INTEGRATION",
    ),
    "flyte": _by_transformers("FlyteCallback", "flytekit", "flytekit", "Flyte")._replace(in_all=False),
}


def is_installed(name: str) -> bool:
    """Whether the packages of a service are importable; none of them is imported."""
    return not _missing_modules(name)


def _missing_modules(name: str) -> list[str]:
    choices = [(modules,) if isinstance(modules, str) else modules for modules in SERVICES[name].modules]
    return [" or ".join(modules) for modules in choices if not any(map(is_importable, modules))]


def is_importable(module: str) -> bool:
    """Whether a module can be found; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        # A parent package is missing, or cannot be imported itself.
        return False


def require_installed(name: str) -> None:
    """Refuse a service whose package is missing."""
    if missing := _missing_modules(name):
        raise ImportError(
            f"report_to={name!r} needs {' and '.join(missing)}, which is not installed: run `pip install "
            f"{SERVICES[name].install}`, or take {name!r} out of report_to."
        )


def check_tracker_name(name: object) -> None:
    """Refuse the name of no service."""
    if name in SERVICES:
        return
    if name in ("none", "all"):
        raise ValueError(f"report_to has {name!r} and other names; give it alone, or leave it out.")
    if "," in str(name):
        raise ValueError(f"report_to={name!r} is one text; give a list of names, or one word for each.")
    hint = suggest_name(str(name), SERVICES)
    raise ValueError(f"report_to={name!r} is no tracker ({hint}). Known: {', '.join(SERVICES)}, all, none.")


def list_available_services() -> list[str]:
    """The services that `report_to="all"` stands for: those installed and not switched off."""
    unusable = {
        # Azure Machine Learning is an MLflow server too, and would get everything twice.
        "azure_ml": lambda: is_installed("mlflow") and SERVICES["mlflow"].get_disabled_reason() is None,
        "comet_ml": lambda: not _comet_is_configured(),
        "kubeflow": lambda: "KUBEFLOW_TRAINER_SERVER_URL" not in os.environ or not _has_kubeflow_callback(),
    }
    return [
        name
        for name, service in SERVICES.items()
        if service.in_all and is_installed(name) and service.get_disabled_reason() is None
        if name not in unusable or not unusable[name]()
    ]


def _has_kubeflow_callback() -> bool:
    major, minor, *_ = importlib.metadata.version("transformers").split(".")
    return (int(major), int(minor)) >= (5, 23)


def _comet_is_configured() -> bool:
    # An experiment without a key ends in an error, or in a question on the terminal.
    import comet_ml

    return comet_ml.config.get_config("comet.api_key") is not None


def list_trackers(report_to: Any) -> list[Any]:
    """The trackers in a value of `report_to`, names or Lightning loggers, as a list; `none` is none."""
    found = list(report_to) if isinstance(report_to, list | tuple | set) else [report_to]
    for item in found:
        if not isinstance(item, str) and not is_a(item, "lightning logger"):
            raise TypeError(
                f"report_to={item!r} is a {type(item).__name__}; give names of trackers or Lightning loggers, one or "
                'a list of them, "all" or "none".'
            )
    return [] if found == ["none"] else found


def format_tracker(tracker: Any) -> str:
    """A tracker as text: its name, or the class of a Lightning logger."""
    return tracker if isinstance(tracker, str) else type(tracker).__name__
