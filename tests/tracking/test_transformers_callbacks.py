"""Trackers that use transformers' callbacks, with stand-ins for the services' clients."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from littrainer import Trainer, TrainerCallback, tracking
from littrainer.tracking import transformers_callbacks
from tests.compat.processes import facts_of
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier
from tests.scenarios.pruners import prunes_the_second_trial
from tests.scenarios.trainers import quiet_trainer
from tests.tracking.both_sides import make_trainer as make_bert_trainer
from tests.tracking.services.stand_ins import Calls, Recorder, install_module


@pytest.fixture(autouse=True)
def levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


@pytest.fixture
def calls() -> Calls:
    return Calls()


def trainer_of(folder: Path, service: str, **changes: Any) -> Trainer:
    logged = {"logging_strategy": "steps", "logging_steps": 1, "max_steps": 2, "eval_strategy": "epoch", **changes}
    return quiet_trainer(folder, report_to=service, **logged)


def search(folder: Path, service: str, **changes: Any) -> None:
    """Search over three trials, of which the second is pruned and the third fails, and train again."""

    class Failing(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if args.weight_decay == 2:
                raise ValueError("too much weight decay")

    trainer = trainer_of(folder, service, **changes)
    trainer.add_callback(Failing())
    trainer.model_init = lambda: VectorClassifier()
    trainer.hyperparameter_search(
        lambda trial: {"weight_decay": trial.suggest_float("decay", trial.number, trial.number)},
        n_trials=3,
        backend="optuna",
        pruner=prunes_the_second_trial(),
        catch=(ValueError,),
    )
    trainer.train()


# ---- Stand-ins for clients -------------------------------------------------------------------------------------------


def fake_clearml(patch: pytest.MonkeyPatch, calls: Calls) -> Any:
    class Task(Recorder):
        current: Any = None
        is_local = True
        _arguments = SimpleNamespace(copy_from_dict=calls.recorder("copy_from_dict"))

        @classmethod
        def init(cls, **kwargs: Any) -> Any:
            calls.append(("init", (), kwargs))
            cls.current = cls(calls)
            return cls.current

        @classmethod
        def current_task(cls) -> Any:
            return cls.current

        @classmethod
        def running_locally(cls) -> bool:
            return cls.is_local

        def get_logger(self) -> Any:
            return Recorder(self.calls)

        def close(self) -> None:
            self.calls.append(("close", (), {}))
            type(self).current = None

    flatten = SimpleNamespace(flatten_dictionary=lambda values: values)
    members = {"Task": Task, "OutputModel": lambda **kwargs: Recorder(calls)}
    install_module(patch, "clearml", utilities=SimpleNamespace(proxy_object=flatten), **members)
    original = importlib.import_module("transformers.integrations.integration_utils").ClearMLCallback
    for name, value in {"_train_run_counter": 0, "_should_close_on_train_end": None}.items():
        patch.setattr(original, name, value)
    return Task


def fake_codecarbon(patch: pytest.MonkeyPatch, calls: Calls) -> None:
    install_module(patch, "codecarbon", EmissionsTracker=calls.recorder("EmissionsTracker", Recorder(calls)))


def fake_comet(patch: pytest.MonkeyPatch, calls: Calls) -> None:
    install_module(patch, "comet_ml", start=calls.recorder("start", Recorder(calls)), ExperimentConfig=dict)
    for name in ("_is_comet_installed", "_is_comet_recent_enough"):
        patch.setattr(f"transformers.integrations.integration_utils.{name}", True)


def fake_dvclive(patch: pytest.MonkeyPatch, calls: Calls) -> None:
    install_module(patch, "dvclive.plots", Metric=SimpleNamespace(could_log=lambda value: isinstance(value, float)))
    install_module(patch, "dvclive.utils", standardize_metric_name=lambda name, framework: f"{framework}/{name}")

    class Live(Recorder):
        def __init__(self) -> None:
            super().__init__(calls)

    patch.setattr(sys.modules["dvclive"], "Live", Live, raising=False)
    patch.delenv("HF_DVCLIVE_LOG_MODEL", raising=False)


def fake_kubeflow(patch: pytest.MonkeyPatch, calls: Calls) -> None:
    patch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://nowhere")
    original = importlib.import_module("transformers.integrations.integration_utils").KubeflowCallback
    patch.setattr(original, "_update_status", calls.recorder("_update_status"))


class _Config(Recorder):
    def __setitem__(self, name: str, value: Any) -> None:
        self.calls.append((name, (value,), {}))


def fake_swanlab(patch: pytest.MonkeyPatch, calls: Calls) -> None:
    def get_run() -> Any:
        raise RuntimeError("No active Run")

    install_module(
        patch,
        "swanlab",
        config=_Config(calls, "config"),
        get_run=get_run,
        init=calls.recorder("init"),
        log=calls.recorder("log"),
    )


# Service -> its stand-in, a call in each training, and a text in this call.
CLIENTS: dict[str, tuple[Any, str, str]] = {
    "clearml": (fake_clearml, "report_scalar", "loss"),
    "codecarbon": (fake_codecarbon, "start", ""),
    "comet_ml": (fake_comet, "__internal_api__log_metrics__", "loss"),
    "dvclive": (fake_dvclive, "log_metric", "loss"),
    "kubeflow": (fake_kubeflow, "_update_status", "loss"),
    "swanlab": (fake_swanlab, "log", "loss"),
}


@pytest.mark.parametrize("service", CLIENTS)
def test_a_callback_of_transformers_reports_training_evaluation_and_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, caplog: pytest.LogCaptureFixture, service: str
) -> None:
    install, call, text = CLIENTS[service]
    install(monkeypatch, calls)
    trainer = make_bert_trainer("littrainer", tmp_path, report_to=service, save_strategy="steps", save_steps=3)
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    assert "Reporting to" not in caplog.text
    assert calls.select(call) and text in str(calls.select(call))


# ---- Differences from transformers' callbacks ------------------------------------------------------------------------


def test_secrets_of_arguments_and_model_are_masked_and_numbers_are_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    fake_swanlab(monkeypatch, calls)
    model = tiny_bert_classifier()
    model.config.loader = {"api_key": "hunter2"}
    trainer = make_bert_trainer(
        "littrainer", tmp_path, model=model, report_to="swanlab", run_name="http://me:hunter2@host"
    )
    trainer.args.lr_scheduler_kwargs = {"token": "hunter2"}
    trainer.log({"tensor": torch.tensor(1.5), "text": "words"})
    ((_, (settings,), _), *_) = calls.select("config.update")
    assert settings["lr_scheduler_kwargs"] == {"token": "<TOKEN>"} and settings["loader"] == {"api_key": "<API_KEY>"}
    assert calls.select("init")[0][2]["experiment_name"] == "http://host" and "hunter2" not in str(calls)
    assert calls.select("log")[-1][1][0]["train/tensor"] == 1.5 and "'text' is left out" in caplog.text
    assert trainer.args.lr_scheduler_kwargs == {"token": "hunter2"}
    assert model.config.to_dict()["loader"] == {"api_key": "hunter2"}


def test_a_failure_of_a_service_is_a_single_warning_and_the_next_training_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    fake_swanlab(monkeypatch, calls)
    log = sys.modules["swanlab"].log

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("swanlab.log", fail)
    trainer = trainer_of(tmp_path, "swanlab")
    assert trainer.train().global_step == 2
    assert caplog.text.count("Reporting to swanlab failed (ConnectionError: no route)") == 1
    monkeypatch.setattr("swanlab.log", log)
    trainer.train()
    assert len(calls.select("init")) == 2 and calls.select("log")


def test_a_subclass_overrides_the_setup_of_transformers_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    fake_swanlab(monkeypatch, calls)

    class CustomCallback(tracking.SwanLabCallback):  # type: ignore[name-defined, misc]
        def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
            self._initialized = True
            self._swanlab.init(project="mine")

    quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [CustomCallback()]}, max_steps=1).train()
    assert calls.select("init") == [("init", (), {"project": "mine"})]


def test_each_trial_is_an_experiment_of_comet_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    fake_comet(monkeypatch, calls)
    monkeypatch.setenv("COMET_LOG_ASSETS", "true")
    search(tmp_path, "comet_ml")
    assert [name for name, _, _ in calls if name in ("start", "clean")] == ["start", "clean"] * 3 + ["start"]
    parameters = [keywords["parameters"] for _, _, keywords in calls.select("log_optimization")]
    assert parameters == [{"decay": 0.0}, {"decay": 1.0}, {"decay": 2.0}]
    folders = [arguments[0] for _, arguments, _ in calls.select("log_asset_folder")]
    assert folders == [str(tmp_path.joinpath(name)) for name in ("run-0", "run-1", "run-2", "")]


def test_each_training_starts_and_closes_a_task_of_clearml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    fake_clearml(monkeypatch, calls)
    search(tmp_path, "clearml")
    assert [name for name, _, _ in calls if name in ("init", "close")] == ["init", "close"] * 4
    # The client marks the task of a failed training.
    trainer = trainer_of(tmp_path, "clearml")
    monkeypatch.setattr(trainer, "compute_loss", _fail)
    with pytest.raises(RuntimeError, match="the loss"):
        trainer.train()
    assert len(calls.select("init")) == len(calls.select("close")) + 1


def test_clearmls_server_overrides_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    task = fake_clearml(monkeypatch, calls)
    task.is_local = False
    task.get_parameter = lambda self, name, **kwargs: False
    task.connect = lambda self, args, section: setattr(args, "save_total_limit", 7)
    task.get_configuration_object_as_dict = lambda self, name: {}
    trainer = trainer_of(tmp_path, "clearml", hub_token="hunter2")
    trainer.train()
    assert (trainer.args.save_total_limit, trainer.args.hub_token) == (7, "hunter2")


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the loss")


def test_codecarbon_measures_from_the_beginning_of_training_to_its_end_or_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    fake_codecarbon(monkeypatch, calls)
    folder = tmp_path / "out"
    trainer = trainer_of(folder, "codecarbon")
    assert calls == [("EmissionsTracker", (), {"output_dir": str(folder)})] and folder.is_dir()
    trainer.train()
    monkeypatch.setattr(trainer, "compute_loss", _fail)
    with pytest.raises(RuntimeError, match="the loss"):
        trainer.train()
    assert [name for name, _, _ in calls][1:] == ["start", "stop"] * 2


@pytest.mark.parametrize(("wish", "artifacts"), [("", []), ("true", ["last"]), ("all", ["", ""])])
def test_dvclive_tracks_the_requested_models_and_ends_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, wish: str, artifacts: list[str]
) -> None:
    fake_dvclive(monkeypatch, calls)
    monkeypatch.setenv("HF_DVCLIVE_LOG_MODEL", wish)
    trainer = trainer_of(tmp_path, "dvclive", save_strategy="steps", save_steps=1)
    trainer.train()
    assert [call[1][0] for call in calls.select("log_artifact")] == [str(tmp_path.joinpath(part)) for part in artifacts]
    assert (tmp_path / "last" / "training_args.bin").is_file() is (artifacts == ["last"])
    assert calls[-1][0] == "end"
    monkeypatch.setattr(trainer, "compute_loss", _fail)
    with pytest.raises(RuntimeError, match="the loss"):
        trainer.train()
    assert calls[-1][0] == "end" and len(calls.select("log_artifact")) == len(artifacts)


def test_an_earlier_transformers_without_a_callback_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("transformers.integrations.integration_utils.KubeflowCallback")
    transformers_callbacks._tracker_class.cache_clear()
    with pytest.raises(ImportError, match="report_to='kubeflow' needs a release of transformers that has Kubeflow"):
        transformers_callbacks.KubeflowCallback  # noqa: B018


def test_transformers_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_callbacks, "TRANSFORMERS_MODULE", "absent.integration_utils")
    monkeypatch.setattr("littrainer.arguments.report_to.is_importable", {"flytekit"}.__contains__)
    transformers_callbacks._tracker_class.cache_clear()
    with pytest.raises(ImportError, match="report_to='flyte' needs transformers, which is not installed"):
        transformers_callbacks.FlyteCallback  # noqa: B018


REDIRECTED = """
import littrainer.auto
from transformers import TrainerCallback
from transformers.integrations import CodeCarbonCallback, integration_utils
from littrainer.tracking import CodeCarbonCallback as ours
import json, pickle
from littrainer.redirection.shim import import_original

original = import_original(integration_utils.__name__).CodeCarbonCallback
assert CodeCarbonCallback is ours and issubclass(ours, original) and original is not ours
assert issubclass(original, TrainerCallback) and pickle.loads(pickle.dumps(ours)) is ours
print(json.dumps(None))
"""


def test_under_the_redirection_the_classes_derive_from_transformers_own(tmp_path: Path) -> None:
    facts_of(REDIRECTED, tmp_path)
