from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from lightning.pytorch.callbacks import LearningRateMonitor

from littrainer.tracking import WandbCallback
from tests.scenarios.trainers import quiet_trainer
from tests.tracking.stores import finished_run, redirect_store


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with redirect_store(tmp_path_factory.mktemp("wandb")):
        yield


@pytest.fixture(autouse=True)
def no_run_left_open() -> Iterator[None]:
    yield
    wandb.finish()


def test_what_lightnings_callbacks_log_is_drawn_at_its_step(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path / "out",
        report_to="wandb",
        max_steps=4,
        logging_strategy="steps",
        logging_steps=2,
        given={"callbacks": [LearningRateMonitor("step")]},
        lightning={"log_every_n_steps": 1},
    )
    trainer.train()
    rates = [row for row in finished_run().history if "lr-AdamW/pg1" in row]
    assert [row["train/global_step"] for row in rates] == [0, 1, 2, 3]
    assert all("trainer/global_step" not in row for row in rates)


def test_a_run_of_the_script_is_used_and_stays_open(tmp_path: Path) -> None:
    mine = wandb.init(project="mine", config={"seed_of_mine": 3})
    trainer = quiet_trainer(tmp_path / "out", report_to="wandb", run_name="other", max_steps=1)
    trainer.train()
    assert wandb.run is mine
    run = finished_run()
    assert (run.project, run.config["seed_of_mine"], run.config["max_steps"]) == ("mine", 3, 1)


def test_the_environment_names_the_project_and_uploads_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "elsewhere")
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    trainer = quiet_trainer(
        tmp_path / "out", report_to="wandb", run_name="named", max_steps=2, save_strategy="steps", save_steps=2
    )
    trainer.train()
    run = finished_run()
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
    found = callback.card_badge()
    assert found is badge is None or str(found).endswith(str(badge))


def test_an_unknown_wish_for_models_is_told_and_uploads_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", "always")
    assert not WandbCallback()._log_model.is_enabled
    assert "WANDB_LOG_MODEL=always is none of checkpoint, end, false" in caplog.text


def test_the_environment_asks_for_histograms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = []
    monkeypatch.setenv("WANDB_WATCH", "gradients")
    monkeypatch.setattr(wandb.Run, "watch", lambda run, model, **keywords: watched.append((model, keywords)))
    trainer = quiet_trainer(tmp_path / "out", report_to="wandb", max_steps=1, logging_steps=500)
    trainer.train()
    assert watched == [(trainer.model, {"log": "gradients", "log_freq": 500})]


def test_a_subclass_sets_the_run_up_in_its_own_way(tmp_path: Path) -> None:
    class OwnProject(WandbCallback):
        def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
            self._initialized = True
            self._wandb.init(project="of the subclass")

    quiet_trainer(tmp_path / "out", max_steps=1, given={"callbacks": [OwnProject()]}).train()
    run = finished_run()
    assert run.project == "of the subclass"
    assert "max_steps" not in run.config
