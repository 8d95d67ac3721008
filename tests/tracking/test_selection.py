"""Trackers for `report_to`, and the table of services."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from littrainer import TrainerCallback, TrainingArguments, tracking
from littrainer.arguments import report_to as table
from littrainer.arguments.report_to import SERVICES, list_available_services
from littrainer.tracking import MLflowCallback, TensorBoardCallback, TrackioCallback, WandbCallback
from littrainer.tracking.selection import create_trackers, get_tracker_class
from tests.scenarios.trainers import quiet_trainer

INSTALLED = ["mlflow", "tensorboard", "wandb", "trackio"]


def test_names_become_callbacks_in_their_order_each_once() -> None:
    for nothing in ("none", ["none"], [], ()):
        assert create_trackers(nothing) == []
    chosen = create_trackers(["wandb", "tensorboard", "wandb"])
    assert [type(callback) for callback in chosen] == [WandbCallback, TensorBoardCallback]


def test_all_is_what_is_installed_and_not_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISABLE_MLFLOW_INTEGRATION", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    installed = set(INSTALLED)
    monkeypatch.setattr(table, "is_installed", installed.__contains__)
    kinds = [MLflowCallback, TensorBoardCallback, WandbCallback, TrackioCallback]
    assert [type(callback) for callback in create_trackers("all")] == kinds
    assert TrainingArguments(report_to="all").report_to == TrainingArguments(report_to=["all"]).report_to == INSTALLED
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "TRUE")
    monkeypatch.setenv("WANDB_DISABLED", "true")
    assert list_available_services() == ["tensorboard", "trackio"]
    # MLflow replaces Azure, and Comet needs a key.
    monkeypatch.delenv("DISABLE_MLFLOW_INTEGRATION")
    keys: dict[str, str] = {}
    monkeypatch.setitem(sys.modules, "comet_ml", SimpleNamespace(config=SimpleNamespace(get_config=keys.get)))
    installed |= {"azure_ml", "comet_ml"}
    assert list_available_services() == ["mlflow", "tensorboard", "trackio"]
    installed.remove("mlflow")
    installed.add("kubeflow")
    keys["comet.api_key"] = "key"
    assert list_available_services() == ["azure_ml", "comet_ml", "tensorboard", "trackio"]
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://nowhere")
    assert list_available_services()[-1] == "kubeflow"
    monkeypatch.setattr("importlib.metadata.version", lambda package: "4.57.1")
    assert "kubeflow" not in list_available_services()


def test_the_names_are_those_that_transformers_documents() -> None:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    assert SERVICES.keys() == INTEGRATION_TO_CALLBACK.keys()
    classes = {name: service.callback.partition(":")[2] for name, service in SERVICES.items()}
    assert classes == {name: INTEGRATION_TO_CALLBACK[name].__name__ for name in SERVICES}
    assert [get_tracker_class(name).service for name in SERVICES] == list(SERVICES)
    assert set(dir(tracking)) > set(classes.values())


def test_installed_services_are_those_that_transformers_finds() -> None:
    from transformers.integrations import get_available_reporting_integrations

    assert list_available_services() == get_available_reporting_integrations()


NAMES = "give names of trackers or Lightning loggers"


@pytest.mark.parametrize(
    ("report_to", "kind", "message"),
    [
        ("tensorbord", ValueError, r"'tensorbord' is no tracker \(did you mean 'tensorboard'\?\)"),
        ("tensorboard,wandb", ValueError, r"'tensorboard,wandb' is one text; give a list of names"),
        ("xyzzy", ValueError, r"Known: azure_ml, .*, all, none"),
        (["none", "wandb"], ValueError, r"report_to has 'none' and other names"),
        (["all", "wandb"], ValueError, r"report_to has 'all' and other names"),
        ("kubeflow", RuntimeError, "KUBEFLOW_TRAINER_SERVER_URL"),
        *((value, TypeError, NAMES) for value in (True, ["wandb", 3], TrainerCallback())),
    ],
)
def test_invalid_trackers_are_refused_by_the_constructor(
    tmp_path: Path, report_to: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        quiet_trainer(tmp_path, report_to=report_to)


@pytest.mark.parametrize("name", SERVICES)
def test_an_error_says_how_to_install_a_missing_package(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(ImportError) as caught:
        create_trackers(name)
    assert f"report_to='{name}' needs " in str(caught.value)
    assert f"`pip install {SERVICES[name].install}`" in str(caught.value)


def test_a_script_can_add_a_tracker_to_the_table_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import integration_utils

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "own", TrainerCallback)
    assert [type(callback) for callback in create_trackers(["own"])] == [TrainerCallback]


def test_trackers_run_after_the_flow_and_before_the_callbacks_of_the_script(tmp_path: Path) -> None:
    class UserCallback(TrainerCallback):
        pass

    trainer = quiet_trainer(tmp_path, report_to=["tensorboard"], trainer_kwargs={"callbacks": [UserCallback()]})
    names = trainer.callback_handler.callback_list.splitlines()
    assert names == ["DefaultFlowCallback", "TensorBoardCallback", "UserCallback", "PrinterCallback"]
    trainer.remove_callback(TensorBoardCallback)
    assert "TensorBoardCallback" not in trainer.callback_handler.callback_list


def test_a_warning_says_once_that_wandb_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_DISABLED", "1")
    with caplog.at_level(logging.WARNING):
        assert create_trackers(["wandb", "wandb"]) == []
    assert caplog.text.count("WANDB_DISABLED switches it off") == 1


PAGE = Path(__file__).parents[2] / "docs/tracking.md"
PACKAGE = Path(tracking.__file__).parent


def test_the_page_lists_each_service_with_what_it_needs() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if "pip install" in line and line.startswith("|")]
    assert rows == [
        f"| `{name}` | {service.about} | `pip install {service.install}` | `{service.callback.partition(':')[2]}` |"
        for name, service in SERVICES.items()
    ]


def test_the_page_names_each_environment_variable_of_its_services() -> None:
    described = set(re.findall(r"[A-Z]+(?:_[A-Z]+)+", PAGE.read_text("utf-8")))
    read = {service.switch for service in SERVICES.values() if service.switch is not None}
    for path in PACKAGE.glob("*.py"):
        read |= set(
            re.findall(
                r'(?:environ\.get|is_enabled_in_environment)\(\s*"([A-Z]+(?:_[A-Z]+)+)"', path.read_text("utf-8")
            )
        )
    assert {"DISABLE_MLFLOW_INTEGRATION", "WANDB_LOG_MODEL"} < read <= described
