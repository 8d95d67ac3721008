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


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    run = SimpleNamespace(get_context=calls.recorder("get_context", Recorder(calls)))
    put_in_place(monkeypatch, "azureml.core.run", Run=run)


@pytest.mark.usefixtures("azure")
def test_azure_gets_numbers_under_their_own_names(tmp_path: Path, calls: Calls) -> None:
    trainer = trainer_of(tmp_path, AzureMLCallback())
    assert [name for name, _, _ in calls] == ["get_context"]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [call[1:] for call in calls.named("log") if call[1][0] == "loss"] == [
        (("loss", loss), {"description": "loss"}) for loss in losses
    ]


def test_flyte_saves_checkpoints_and_shows_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    context = SimpleNamespace(checkpoint=Recorder(calls, "checkpoint"))
    put_in_place(monkeypatch, "flytekit", current_context=lambda: context, Deck=calls.recorder("Deck"))
    renderer = SimpleNamespace(to_html=lambda frame: frame)
    put_in_place(monkeypatch, "flytekitplugins.deck.renderer", TableRenderer=lambda: renderer)
    put_in_place(monkeypatch, "pandas", DataFrame=list)
    trainer = trainer_of(tmp_path, FlyteCallback(), save_strategy="steps", save_steps=1)
    trainer.train()
    saved = [Path(call[1][0]).name for call in calls.named("checkpoint.save")]
    assert saved == ["checkpoint-1", "checkpoint-2"]
    ((_, (title, shown), _),) = calls.named("Deck")
    assert (title, shown) == ("Log History", trainer.state.log_history)


def test_flyte_without_its_deck_says_what_to_install_and_saves_checkpoints_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    context = SimpleNamespace(checkpoint=Recorder(calls, "checkpoint"))
    put_in_place(monkeypatch, "flytekit", current_context=lambda: context)
    monkeypatch.setitem(sys.modules, "flytekitplugins", None)
    trainer_of(tmp_path, FlyteCallback(), save_strategy="steps", save_steps=2).train()
    assert "flytekitplugins-deck-standard" in caplog.text
    assert [name for name, _, _ in calls] == ["checkpoint.save"]
    trainer_of(tmp_path / "other", FlyteCallback(sync_checkpoints=False), save_strategy="steps", save_steps=2).train()
    assert len(calls) == 1


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
    assert [name for name, _, _ in calls] == ["EmissionsTracker", "start", "stop"]
    monkeypatch.setattr(trainer, "compute_loss", _fail)
    with pytest.raises(RuntimeError, match="the loss"):
        trainer.train()
    assert [name for name, _, _ in calls][3:] == ["start", "stop"]


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the loss")


def test_codecarbon_is_refused_on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, "codecarbon")
    monkeypatch.setattr("torch.version.hip", "6.2")
    with pytest.raises(RuntimeError, match="AMD ROCm"):
        CodeCarbonCallback()


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


@pytest.mark.usefixtures("comet")
def test_each_trial_is_an_experiment_of_comet_which_ends_with_it(tmp_path: Path, calls: Calls) -> None:
    search_of(tmp_path, CometCallback())
    begun_and_ended = [(name, given) for name, _, given in calls if name in ("CometLogger", "clean")]
    trials = [("CometLogger", {"mode": "create", "name": f"run-{number}"}) for number in range(3)]
    ends = [("clean", {})] * 3
    together = [one for pair in zip(trials, ends, strict=True) for one in pair]
    assert begun_and_ended == [*together, ("CometLogger", {"mode": None, "name": None})]
    drawn = [given["parameters"] for _, _, given in calls.named("log_optimization")]
    assert drawn == [{"decay": 0.0}, {"decay": 1.0}, {"decay": 2.0}]


@pytest.mark.usefixtures("comet")
def test_an_unknown_mode_of_comet_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("COMET_MODE", "sometimes")
    trainer_of(tmp_path, CometCallback()).train()
    assert "COMET_MODE=sometimes is none of get, get_or_create, create" in caplog.text


@pytest.fixture
def comet(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    class Logger(Recorder):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(calls)
            calls.append(("CometLogger", (), kwargs))
            self.experiment = Recorder(calls)

    put_in_place(monkeypatch, "comet_ml")
    monkeypatch.setattr("lightning.pytorch.loggers.CometLogger", Logger)
    for name in ("COMET_MODE", "COMET_LOG_ASSETS"):
        monkeypatch.delenv(name, raising=False)


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


def test_each_trial_is_a_run_of_swanlab_which_ends_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swanlab: Any, calls: Calls
) -> None:
    active: list[Any] = []
    monkeypatch.setattr(swanlab, "get_run", lambda: active[-1] if active else None)
    monkeypatch.setattr(swanlab, "init", lambda **kwargs: active.append(kwargs.get("experiment_name")))
    monkeypatch.setattr(swanlab, "finish", lambda: calls.append(("finish", (active.pop(),), {})), raising=False)
    search_of(tmp_path, SwanLabCallback())
    assert [call[1][0] for call in calls.named("finish")] == ["run-0", "run-1", "run-2"]
    # What follows the search has a run without the name of a trial.
    assert active == [None]


def test_trials_within_an_active_run_of_swanlab_leave_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swanlab: Any, calls: Calls
) -> None:
    monkeypatch.setattr(swanlab, "get_run", lambda: "active")
    monkeypatch.setattr(swanlab, "finish", _fail, raising=False)
    search_of(tmp_path, SwanLabCallback())
    assert calls.named("init") == [] and calls.named("log")


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

    def model(**kwargs: Any) -> Any:
        calls.append(("OutputModel", (), kwargs))
        return SimpleNamespace(
            name=kwargs["name"],
            connect=lambda **kwargs: None,
            update_weights_package=calls.recorder("update_weights_package"),
        )

    removed = SimpleNamespace(
        Model=SimpleNamespace(remove=lambda model, **kwargs: calls.append(("remove", (model.name,), {})))
    )
    put_in_place(monkeypatch, "clearml", Task=Task, OutputModel=model, model=removed)
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
    assert not calls.named("close") and not calls.named("init") and not calls.named("OutputModel")


@pytest.mark.usefixtures("clearml")
def test_each_trial_is_a_task_of_clearml_that_says_how_it_ended(tmp_path: Path, calls: Calls) -> None:
    search_of(tmp_path, ClearMLCallback())
    begun = [(given["task_name"], given["reuse_last_task_id"]) for _, _, given in calls.named("init")]
    assert begun == [("Trainer-run-0", False), ("Trainer-run-1", False), ("Trainer-run-2", False), ("Trainer", True)]
    ends = [name for name, _, _ in calls if name in ("mark_failed", "mark_stopped", "close")]
    assert ends == ["close", "close", "mark_failed", "close", "close"]


class _Live(Recorder):
    def __init__(self, calls: Calls | None = None) -> None:
        super().__init__(calls if calls is not None else Calls())


@pytest.fixture
def dvclive(monkeypatch: pytest.MonkeyPatch) -> None:
    package = put_in_place(monkeypatch, "dvclive", Live=_Live)
    is_float = SimpleNamespace(could_log=lambda value: isinstance(value, float))
    for part, members in (("plots", {"Metric": is_float}), ("utils", {"standardize_metric_name": _named})):
        child = type(package)(f"dvclive.{part}")
        vars(child).update(members)
        monkeypatch.setitem(sys.modules, f"dvclive.{part}", child)


def _named(name: str, framework: str) -> str:
    return f"{framework}/{name}"


@pytest.mark.usefixtures("dvclive")
@pytest.mark.parametrize(("wish", "artifacts"), [(None, []), ("true", ["last"]), ("all", ["", ""])])
def test_dvclive_tracks_the_models_that_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, wish: str | None, artifacts: list[str]
) -> None:
    monkeypatch.delenv("HF_DVCLIVE_LOG_MODEL", raising=False)
    if wish is not None:
        monkeypatch.setenv("HF_DVCLIVE_LOG_MODEL", wish)
    trainer_of(tmp_path, DVCLiveCallback(live=_Live(calls)), save_strategy="steps", save_steps=1).train()
    assert [call[1][0] for call in calls.named("log_artifact")] == [
        str(tmp_path / part) if part else str(tmp_path) for part in artifacts
    ]
    assert (tmp_path / "last" / "training_args.bin").is_file() is (artifacts == ["last"])
    assert calls[-1][0] == "end"


@pytest.mark.usefixtures("dvclive")
def test_each_trial_writes_with_a_live_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    class Live(_Live):
        def __init__(self, dir: str = "dvclive") -> None:
            super().__init__(calls)
            calls.append(("Live", (dir,), {}))

    monkeypatch.setattr(sys.modules["dvclive"], "Live", Live)
    search_of(tmp_path, DVCLiveCallback())
    folders = [call[1][0] for call in calls.named("Live")]
    assert folders == [f"dvclive/run-{number}" for number in range(3)] + ["dvclive"]


@pytest.fixture(autouse=True)
def levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
