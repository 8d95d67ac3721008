from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from lightning.pytorch.callbacks import LearningRateMonitor

from littrainer.tracking import WandbCallback
from tests.scenarios.trainers import quiet_trainer
from tests.tracking.stores import finish_run, redirect_store


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with redirect_store(tmp_path_factory.mktemp("wandb")):
        yield


@pytest.fixture(autouse=True)
def finish_open_runs() -> Iterator[None]:
    yield
    wandb.finish()


def test_metrics_of_lightnings_callbacks_have_their_step(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path / "out",
        report_to="wandb",
        max_steps=4,
        logging_strategy="steps",
        logging_steps=2,
        trainer_kwargs={"callbacks": [LearningRateMonitor("step")]},
        lightning={"log_every_n_steps": 1},
    )
    trainer.train()
    rates = [row for row in finish_run().history if "lr-AdamW/pg1" in row]
    assert [row["train/global_step"] for row in rates] == [0, 1, 2, 3]
    assert all("trainer/global_step" not in row for row in rates)


def test_a_run_of_the_script_is_used_and_stays_open(tmp_path: Path) -> None:
    mine = wandb.init(project="mine", config={"seed_of_mine": 3})
    trainer = quiet_trainer(tmp_path / "out", report_to="wandb", run_name="other", max_steps=1)
    trainer.train()
    assert wandb.run is mine
    run = finish_run()
    assert (run.project, run.config["seed_of_mine"], run.config["max_steps"]) == ("mine", 3, 1)


def test_the_environment_names_the_project_and_uploads_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "elsewhere")
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    trainer = quiet_trainer(
        tmp_path / "out", report_to="wandb", run_name="named", max_steps=2, save_strategy="steps", save_steps=2
    )
    trainer.train()
    run = finish_run()
    assert run.project == "elsewhere"
    assert [name for name, _ in run.artifacts] == ["model-named"] * 3
    assert [set(aliases) - {"latest"} for _, aliases in run.artifacts] == [
        {"base_model"},
        {"epoch_0.67", "checkpoint_global_step_2"},
        {"final_model"},
    ]


@pytest.mark.parametrize(
    ("log_model", "url", "badge"),
    [("false", "https://w", None), ("end", None, None), ("end", "https://w", "(https://w)")],
)
def test_a_badge_links_to_an_online_run_with_models(
    monkeypatch: pytest.MonkeyPatch, log_model: str, url: str | None, badge: str | None
) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", log_model)
    callback = WandbCallback()
    callback._wandb = SimpleNamespace(run=SimpleNamespace(url=url))
    link = callback.card_badge()
    assert link is badge is None or str(link).endswith(str(badge))


def test_an_unknown_value_for_models_causes_a_warning_and_uploads_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", "always")
    assert not WandbCallback()._log_model.is_enabled
    assert "WANDB_LOG_MODEL=always is none of checkpoint, end, false" in caplog.text


def test_the_environment_enables_histograms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch_calls = []
    monkeypatch.setenv("WANDB_WATCH", "gradients")
    monkeypatch.setattr(wandb.Run, "watch", lambda run, model, **keywords: watch_calls.append((model, keywords)))
    trainer = quiet_trainer(tmp_path / "out", report_to="wandb", max_steps=1, logging_steps=500)
    trainer.train()
    assert watch_calls == [(trainer.model, {"log": "gradients", "log_freq": 500})]


def test_a_subclass_overrides_setup(tmp_path: Path) -> None:
    class CustomProject(WandbCallback):
        def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
            self._initialized = True
            self._wandb.init(project="of the subclass")

    quiet_trainer(tmp_path / "out", max_steps=1, trainer_kwargs={"callbacks": [CustomProject()]}).train()
    run = finish_run()
    assert run.project == "of the subclass"
    assert "max_steps" not in run.config
