"""Services whose clients are not installed with the tests, each by a stand-in for its client."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from littrainer import Trainer, TrainerCallback
from littrainer.tracking import (
    AzureMLCallback,
    ClearMLCallback,
    CodeCarbonCallback,
    CometCallback,
    DagsHubCallback,
    DVCLiveCallback,
    FlyteCallback,
    SwanLabCallback,
)
from tests.scenarios.models import VectorClassifier
from tests.scenarios.pruners import prunes_the_second_trial
from tests.scenarios.trainers import quiet_trainer
from tests.tracking.stores import mlflow_store, runs_in

from .stand_ins import Calls, Recorder, put_in_place


@pytest.fixture
def calls() -> Calls:
    return Calls()


def trainer_of(folder: Path, callback: Any, **changes: Any) -> Trainer:
    logged = {"logging_strategy": "steps", "logging_steps": 1, "max_steps": 2, "eval_strategy": "epoch", **changes}
    return quiet_trainer(folder, given={"callbacks": [callback]}, **logged)


def search_of(folder: Path, callback: Any) -> None:
    """A search over three trials, of which the second is pruned and the third fails; and a training after it."""

    class Failing(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if args.weight_decay == 2:
                raise ValueError("too much weight decay")

    trainer = trainer_of(folder, callback)
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


def test_azure_gets_numbers_under_their_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    run = SimpleNamespace(get_context=calls.recorder("get_context", Recorder(calls)))
    put_in_place(monkeypatch, "azureml.core.run", Run=run)
    trainer = trainer_of(tmp_path, AzureMLCallback())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert calls[0][0] == "get_context"
    assert [call for call in calls.named("log") if call[1][0] == "loss"] == [
        ("log", ("loss", loss), {"description": "loss"}) for loss in losses
    ]


@pytest.mark.parametrize("has_deck", [True, False])
def test_flyte_saves_checkpoints_and_shows_the_history_on_its_deck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, caplog: pytest.LogCaptureFixture, has_deck: bool
) -> None:
    context = SimpleNamespace(checkpoint=Recorder(calls, "checkpoint"))
    put_in_place(monkeypatch, "flytekit", current_context=lambda: context, Deck=calls.recorder("Deck"))
    renderer = SimpleNamespace(to_html=lambda frame: frame)
    put_in_place(monkeypatch, "flytekitplugins.deck.renderer", TableRenderer=lambda: renderer)
    put_in_place(monkeypatch, "pandas", DataFrame=list)
    if not has_deck:
        monkeypatch.setitem(sys.modules, "flytekitplugins.deck", None)
    trainer = trainer_of(tmp_path, FlyteCallback(), save_strategy="steps", save_steps=1)
    trainer.train()
    saved = [Path(call[1][0]).name for call in calls.named("checkpoint.save")]
    assert saved == ["checkpoint-1", "checkpoint-2"]
    shown = [("Deck", ("Log History", trainer.state.log_history), {})]
    assert calls.named("Deck") == (shown if has_deck else [])
    assert ("flytekitplugins-deck-standard" in caplog.text) is not has_deck


def test_dagshub_uploads_the_output_dir_where_it_is_asked_to_and_needs_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    def uploaded(**kwargs: Any) -> Any:
        calls.append(("Repo", (), kwargs))
        return SimpleNamespace(directory=lambda path: SimpleNamespace(add_dir=calls.recorder(f"add_dir {path}")))

    put_in_place(monkeypatch, "dagshub.upload", Repo=uploaded)
    with mlflow_store(tmp_path, monkeypatch) as client:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://dagshub.com/someone/project.mlflow")
        monkeypatch.setenv("HF_DAGSHUB_LOG_ARTIFACTS", "true")
        monkeypatch.setenv("BRANCH", "trials")
        trainer = trainer_of(tmp_path / "out", DagsHubCallback())
        trainer.train()
        assert calls == [
            ("Repo", (), {"owner": "someone", "name": "project", "branch": "trials"}),
            ("add_dir artifacts", (str(tmp_path / "out"),), {}),
        ]
        assert [run.info.status for run in runs_in(client)] == ["FINISHED"]
        for uri, reason in (("", "is not set"), ("mlruns", "does not end in /OWNER/REPOSITORY")):
            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
            trainer_of(tmp_path / "out", DagsHubCallback()).train()
            assert "Reporting to dagshub failed" in caplog.text and reason in caplog.text


def test_codecarbon_measures_from_the_beginning_of_training_to_its_end_or_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    tracker = calls.recorder("EmissionsTracker", Recorder(calls))
    put_in_place(monkeypatch, "codecarbon", EmissionsTracker=tracker)
    trainer = trainer_of(tmp_path, CodeCarbonCallback())
    assert calls == [("EmissionsTracker", (), {"output_dir": str(tmp_path)})]
    trainer.train()
    monkeypatch.setattr(trainer, "compute_loss", _fail)
    with pytest.raises(RuntimeError, match="the loss"):
        trainer.train()
    assert [name for name, _, _ in calls][1:] == ["start", "stop"] * 2
    monkeypatch.setattr("torch.version.hip", "6.2")
    with pytest.raises(RuntimeError, match="AMD ROCm"):
        CodeCarbonCallback()


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the loss")


@pytest.fixture
def swanlab(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> Any:
    config: dict[str, Any] = {}
    for name in ("SWANLAB_PROJECT", "SWANLAB_RUN_ID", "SWANLAB_RESUME", "SWANLAB_LOG_MODEL"):
        monkeypatch.delenv(name, raising=False)
    members = {name: calls.recorder(name) for name in ("init", "log", "get_run")}
    return put_in_place(monkeypatch, "swanlab", config=config, **members)


def test_the_environment_names_project_run_and_resumption_of_swanlab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swanlab: Any, calls: Calls
) -> None:
    monkeypatch.setenv("SWANLAB_PROJECT", "mine")
    monkeypatch.setenv("SWANLAB_RUN_ID", "abc")
    monkeypatch.setenv("SWANLAB_RESUME", "must")
    trainer_of(tmp_path, SwanLabCallback(), run_name="trial").train()
    expected = {"project": "mine", "experiment_name": "trial", "id": "abc", "resume": "must"}
    assert calls.named("init") == [("init", (), expected)]
    assert swanlab.config["FRAMEWORK"].endswith("transformers")


def test_each_trial_is_an_experiment_of_comet_which_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    class Logger(Recorder):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(calls)
            calls.append(("CometLogger", (), kwargs))
            self.experiment = Recorder(calls)

    put_in_place(monkeypatch, "comet_ml")
    monkeypatch.setattr("lightning.pytorch.loggers.CometLogger", Logger)
    monkeypatch.delenv("COMET_MODE", raising=False)
    search_of(tmp_path, CometCallback())
    begun_and_ended = [(name, given) for name, _, given in calls if name in ("CometLogger", "clean")]
    trials = [("CometLogger", {"mode": "create", "name": f"run-{number}"}) for number in range(3)]
    together = [one for trial in trials for one in (trial, ("clean", {}))]
    assert begun_and_ended == [*together, ("CometLogger", {"mode": None, "name": None})]
    drawn = [given["parameters"] for _, _, given in calls.named("log_optimization")]
    assert drawn == [{"decay": 0.0}, {"decay": 1.0}, {"decay": 2.0}]
    monkeypatch.setenv("COMET_MODE", "sometimes")
    trainer_of(tmp_path, CometCallback()).train()
    assert "COMET_MODE=sometimes is none of get, get_or_create, create" in caplog.text


def test_a_badge_links_to_a_run_of_swanlab_in_the_cloud_where_the_environment_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, swanlab: Any
) -> None:
    address = "https://swanlab.cn/@me/mine/runs/1"
    run = SimpleNamespace(public=SimpleNamespace(cloud=SimpleNamespace(experiment_url=address)))
    monkeypatch.setattr(swanlab, "get_run", lambda: run)
    assert SwanLabCallback().card_badge() is None
    monkeypatch.setenv("SWANLAB_LOG_MODEL", "checkpoint")
    assert str(SwanLabCallback().card_badge()).endswith(f"({address})")
    monkeypatch.setattr(swanlab, "get_run", lambda: SimpleNamespace(public=None))
    assert SwanLabCallback().card_badge() is None


@pytest.mark.parametrize("is_active", [False, True])
def test_each_trial_is_a_run_of_swanlab_unless_the_script_has_one_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swanlab: Any, calls: Calls, is_active: bool
) -> None:
    active: list[Any] = ["mine"] if is_active else []
    monkeypatch.setattr(swanlab, "get_run", lambda: active[-1] if active else None)
    monkeypatch.setattr(swanlab, "init", lambda **kwargs: active.append(kwargs.get("experiment_name")))
    monkeypatch.setattr(swanlab, "finish", lambda: calls.append(("finish", (active.pop(),), {})), raising=False)
    search_of(tmp_path, SwanLabCallback())
    assert [call[1][0] for call in calls.named("finish")] == ([] if is_active else ["run-0", "run-1", "run-2"])
    # What follows the search has a run without the name of a trial.
    assert active == (["mine"] if is_active else [None]) and calls.named("log")


class _Task(Recorder):
    current: Any = None

    @classmethod
    def current_task(cls) -> Any:
        return cls.current

    @classmethod
    def running_locally(cls) -> bool:
        return True

    def get_logger(self) -> Any:
        return Recorder(self.calls)

    def close(self) -> None:
        self.calls.append(("close", (), {}))
        type(self).current = None


@pytest.fixture
def clearml(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> type[_Task]:
    class Task(_Task):
        @classmethod
        def init(cls, **kwargs: Any) -> Any:
            calls.append(("init", (), kwargs))
            cls.current = cls(calls)
            return cls.current

    class Model(Recorder):
        def __init__(self, task: Any, name: str) -> None:
            super().__init__(calls)
            self.name = ""
            self.model_name = name

        @staticmethod
        def remove(model: Any, **kwargs: Any) -> None:
            calls.append(("remove", (model.model_name,), {}))

    put_in_place(monkeypatch, "clearml", Task=Task, OutputModel=Model, model=SimpleNamespace(Model=Model))
    for name in ("CLEARML_PROJECT", "CLEARML_TASK", "CLEARML_LOG_MODEL"):
        monkeypatch.delenv(name, raising=False)
    return Task


@pytest.mark.usefixtures("clearml")
def test_a_task_that_training_starts_is_closed_with_it_and_gets_the_checkpoints_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    monkeypatch.setenv("CLEARML_PROJECT", "mine")
    keeps = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = trainer_of(tmp_path, ClearMLCallback(), **keeps)
    trainer.train()
    ((_, _, given),) = calls.named("init")
    assert (given["project_name"], given["task_name"]) == ("mine", "Trainer")
    uploaded = [call[2]["target_filename"] for call in calls.named("update_weights_package")]
    assert uploaded == ["checkpoint-1", "checkpoint-2"]
    assert calls.named("remove") == [("remove", ("checkpoint-1",), {})]
    assert calls[-1][0] == "close"
    trainer.train()
    assert len(calls.named("init")) == 2


def test_a_task_of_the_script_is_left_open_and_its_trainings_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clearml: type[_Task], calls: Calls
) -> None:
    monkeypatch.setattr(ClearMLCallback, "_train_run_counter", 0)
    clearml.current = clearml(calls)
    for number in range(2):
        trainer_of(tmp_path / str(number), ClearMLCallback(), save_strategy="steps", save_steps=2).train()
    titles = [call[2]["title"] for call in calls.named("report_scalar") if call[2]["series"] == "loss"]
    assert {"train", "train_2"} <= set(titles)
    assert not calls.named("close") and not calls.named("init") and not calls.named("connect")


@pytest.mark.usefixtures("clearml")
def test_each_trial_is_a_task_of_clearml_that_says_how_it_ended(tmp_path: Path, calls: Calls) -> None:
    search_of(tmp_path, ClearMLCallback())
    begun = [(given["task_name"], given["reuse_last_task_id"]) for _, _, given in calls.named("init")]
    assert begun == [("Trainer-run-0", False), ("Trainer-run-1", False), ("Trainer-run-2", False), ("Trainer", True)]
    ends = [name for name, _, _ in calls if name in ("mark_failed", "mark_stopped", "close")]
    assert ends == ["close", "close", "mark_failed", "close", "close"]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> Any:
    class Live(Recorder):
        def __init__(self, dir: str = "dvclive") -> None:
            super().__init__(calls)
            calls.append(("Live", (dir,), {}))

    put_in_place(monkeypatch, "dvclive.plots", Metric=SimpleNamespace(could_log=lambda value: isinstance(value, float)))
    put_in_place(monkeypatch, "dvclive.utils", standardize_metric_name=lambda name, framework: f"{framework}/{name}")
    sys.modules["dvclive"].Live = Live  # type: ignore[attr-defined]
    monkeypatch.delenv("HF_DVCLIVE_LOG_MODEL", raising=False)
    return Live


@pytest.mark.parametrize(("wish", "artifacts"), [("", []), ("true", ["last"]), ("all", ["", ""])])
def test_dvclive_tracks_the_models_that_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, live: Any, wish: str, artifacts: list[str]
) -> None:
    monkeypatch.setenv("HF_DVCLIVE_LOG_MODEL", wish)
    trainer_of(tmp_path, DVCLiveCallback(live=live()), save_strategy="steps", save_steps=1).train()
    assert [call[1][0] for call in calls.named("log_artifact")] == [str(tmp_path.joinpath(part)) for part in artifacts]
    assert (tmp_path / "last" / "training_args.bin").is_file() is (artifacts == ["last"])
    assert calls[-1][0] == "end"


@pytest.mark.usefixtures("live")
def test_each_trial_writes_with_a_live_in_a_folder_of_its_own(tmp_path: Path, calls: Calls) -> None:
    search_of(tmp_path, DVCLiveCallback())
    folders = [call[1][0] for call in calls.named("Live")]
    assert folders == [f"dvclive/run-{number}" for number in range(3)] + ["dvclive"]


@pytest.fixture(autouse=True)
def levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
