"""Experiment trackers of `report_to`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import Any, NamedTuple

from littrainer.arguments.did_you_mean import suggest_name
from littrainer.runtime.lazy_isinstance import is_a


def is_enabled_in_environment(name: str) -> bool:
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")


class Service(NamedTuple):
    """Experiment tracker.

    Parameters:
        callback: "module:class" within `littrainer.tracking`.
        modules: required modules; a tuple lists alternatives.
        install: arguments of `pip install`.
        switch: environment variable that disables it.
        is_in_all: include it in `report_to="all"`.
    """

    callback: str
    modules: tuple[str | tuple[str, ...], ...]
    install: str
    about: str
    switch: str | None = None
    is_in_all: bool = True

    def get_disabled_reason(self) -> str | None:
        if self.switch is None or not is_enabled_in_environment(self.switch):
            return None
        return f"the environment variable {self.switch} switches it off"


def _wrap_callback(callback: str, module: str, install: str, about: str) -> Service:
    return Service(f"transformers_callbacks:{callback}", (module, "transformers"), f"{install} transformers", about)


# In the order of `report_to="all"`.
SERVICES: dict[str, Service] = {
    "azure_ml": _wrap_callback("AzureMLCallback", "azureml.core.run", "azureml-core", "Azure Machine Learning"),
    "comet_ml": _wrap_callback("CometCallback", "comet_ml", '"comet-ml>=3.43.2"', "Comet"),
    "dagshub": Service(
        "transformers_callbacks:DagsHubCallback",
        ("dagshub", "mlflow", "transformers"),
        "dagshub mlflow transformers",
        "DagsHub, by MLflow",
    ),
    "dvclive": _wrap_callback("DVCLiveCallback", "dvclive", "dvclive", "DVCLive"),
    "mlflow": Service("mlflow:MLflowCallback", ("mlflow",), "mlflow", "MLflow", "DISABLE_MLFLOW_INTEGRATION"),
    "neptune": _wrap_callback("NeptuneCallback", "neptune", "neptune", "Neptune"),
    "tensorboard": Service(
        "tensorboard:TensorBoardCallback", (("tensorboard", "tensorboardX"),), "tensorboard", "TensorBoard event files"
    ),
    "wandb": Service("wandb:WandbCallback", ("wandb",), "wandb", "Weights & Biases", "WANDB_DISABLED"),
    "codecarbon": _wrap_callback("CodeCarbonCallback", "codecarbon", "codecarbon", "CodeCarbon emissions"),
    "clearml": _wrap_callback("ClearMLCallback", "clearml", "clearml", "ClearML"),
    "swanlab": _wrap_callback("SwanLabCallback", "swanlab", "swanlab", "SwanLab"),
    "trackio": Service("trackio:TrackioCallback", ("trackio",), "trackio", "Trackio"),
    "kubeflow": Service(
        "transformers_callbacks:KubeflowCallback",
        ("transformers",),
        '"transformers>=5.23"',
        "Kubeflow Trainer, in a TrainJob",
        "DISABLE_KUBEFLOW_INTEGRATION",
    ),
    "flyte": _wrap_callback("FlyteCallback", "flytekit", "flytekit", "Flyte")._replace(is_in_all=False),
}


def is_installed(name: str) -> bool:
    return not _missing_modules(name)


def _missing_modules(name: str) -> list[str]:
    choices = [(modules,) if isinstance(modules, str) else modules for modules in SERVICES[name].modules]
    return [" or ".join(modules) for modules in choices if not any(map(is_importable, modules))]


def is_importable(module: str) -> bool:
    """Return whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        # A parent package is missing or fails to import.
        return False


def require_installed(name: str) -> None:
    if missing := _missing_modules(name):
        raise ImportError(
            f"report_to={name!r} needs {' and '.join(missing)}, which is not installed: run `pip install "
            f"{SERVICES[name].install}`, or take {name!r} out of report_to."
        )


def check_tracker_name(name: object) -> None:
    if name in SERVICES:
        return
    if name in ("none", "all"):
        raise ValueError(f"report_to has {name!r} and other names; give it alone, or leave it out.")
    if "," in str(name):
        raise ValueError(f"report_to={name!r} is one text; give a list of names, or one word for each.")
    hint = suggest_name(str(name), SERVICES)
    raise ValueError(f"report_to={name!r} is no tracker ({hint}). Known: {', '.join(SERVICES)}, all, none.")


def list_available_services() -> list[str]:
    exclusions = {
        # An MLflow server, which would receive everything twice.
        "azure_ml": lambda: is_installed("mlflow") and SERVICES["mlflow"].get_disabled_reason() is None,
        "comet_ml": lambda: not _comet_is_configured(),
        "kubeflow": lambda: "KUBEFLOW_TRAINER_SERVER_URL" not in os.environ or not _has_kubeflow_callback(),
    }
    return [
        name
        for name, service in SERVICES.items()
        if service.is_in_all and is_installed(name) and service.get_disabled_reason() is None
        if name not in exclusions or not exclusions[name]()
    ]


def _has_kubeflow_callback() -> bool:
    major, minor, *_ = importlib.metadata.version("transformers").split(".")
    return (int(major), int(minor)) >= (5, 23)


def _comet_is_configured() -> bool:
    # Without a key Comet raises an error or prompts on the terminal.
    import comet_ml

    return comet_ml.config.get_config("comet.api_key") is not None


def list_trackers(report_to: Any) -> list[Any]:
    trackers = list(report_to) if isinstance(report_to, list | tuple | set) else [report_to]
    for tracker in trackers:
        if not isinstance(tracker, str) and not is_a(tracker, "lightning logger"):
            raise TypeError(
                f"report_to={tracker!r} is a {type(tracker).__name__}; give names of "
                'trackers or Lightning loggers, one or a list of them, "all" or "none".'
            )
    return [] if trackers == ["none"] else trackers


def format_tracker(tracker: Any) -> str:
    return tracker if isinstance(tracker, str) else type(tracker).__name__
