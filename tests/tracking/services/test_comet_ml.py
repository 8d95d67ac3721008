import contextlib
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

comet_ml = pytest.importorskip("comet_ml", reason="`make test-trackers` installs comet_ml")

from tests.scenarios.trainers import quiet_trainer  # noqa: E402
from tests.tracking.both_sides import SIDES, same_on_both_machines, trainer_of  # noqa: E402

UNSET = ("COMET_API_KEY", "COMET_MODE", "COMET_EXPERIMENT_KEY", "COMET_LOG_ASSETS", "COMET_PROJECT_NAME")
# What comet_ml would look for on the network or in the environment of the machine.
SWITCHED_OFF = ("COMET_AUTO_LOG_CO2", "COMET_AUTO_LOG_ENV_DETAILS", "COMET_AUTO_LOG_GIT_METADATA")


@contextlib.contextmanager
def kept_offline(folder: Path) -> Iterator[Path]:
    """Let comet_ml write to a folder only, which it yields."""
    place = folder / "comet"
    place.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in UNSET:
            patch.delenv(name, raising=False)
        for name in (*SWITCHED_OFF, "COMET_START_ONLINE"):
            patch.setenv(name, "False")
        patch.setenv("COMET_OFFLINE_DIRECTORY", str(place))
        yield place
        comet_ml.end()


def messages_in(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """What the one experiment in a folder would send, by kind, read from its archive after it has ended."""
    comet_ml.end()
    (archive,) = folder.glob("*.zip")
    with zipfile.ZipFile(archive) as files:
        messages = map(json.loads, files.read("messages.json").splitlines())
        return [(message["type"], message["payload"]) for message in messages]


def metrics_in(messages: list[tuple[str, dict[str, Any]]]) -> dict[str, list[tuple[Any, ...]]]:
    """Step, epoch and value of each metric that a Trainer logs."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for kind, payload in messages:
        metric = payload.get("metric", {})
        if kind == "metric_msg" and metric["metricName"].startswith(("train/", "eval/", "test/")):
            row = metric["step"], metric["epoch"], metric["metricValue"]
            found.setdefault(metric["metricName"], []).append(row)
    return found


def parameters_in(messages: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The parameters of the experiment."""
    parameters = [payload.get("param") or payload["params"] for kind, payload in messages if kind == "parameter_msg"]
    return {parameter["paramName"]: parameter["paramValue"] for parameter in parameters}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each side left behind: training, an evaluation, a prediction."""
    found = {}
    for side in SIDES:
        folder = tmp_path_factory.mktemp(side)
        with kept_offline(folder) as place:
            trainer = trainer_of(side, folder / "out", report_to="comet_ml")
            trainer.train()
            trainer.evaluate()
            trainer.predict(trainer.eval_dataset)
            found[side] = messages_in(place)
    return found


def test_metrics_steps_and_values_are_those_of_transformers(both: dict[str, Any]) -> None:
    theirs, ours = (same_on_both_machines(metrics_in(both[side])) for side in SIDES)
    assert theirs == ours
    assert {"train/loss", "eval/accuracy", "test/loss", "train/total_flos"} <= ours.keys()
    assert [step for step, _, _ in ours["train/loss"]] == [2, 4, 6]


def test_parameters_and_name_are_those_of_transformers(both: dict[str, Any]) -> None:
    theirs, ours = (parameters_in(both[side]) for side in SIDES)
    expected = {name: value for name, value in theirs.items() if name != "args|output_dir"}
    assert {name: ours.get(name) for name in expected} == expected
    others = [payload for kind, payload in both["littrainer"] if kind == "log_other"]
    assert "one short run" in [payload["value"] for payload in others if payload["key"] == "Name"]


def test_checkpoints_are_uploaded_where_the_environment_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kept_offline(tmp_path) as place:
        monkeypatch.setenv("COMET_LOG_ASSETS", "true")
        trainer = quiet_trainer(
            tmp_path / "out", report_to="comet_ml", max_steps=1, save_strategy="steps", save_steps=1
        )
        trainer.train()
        uploaded = [payload for kind, payload in messages_in(place) if kind == "file_upload"]
    assert any("trainer_state.json" in json.dumps(payload) for payload in uploaded)


def test_an_unknown_mode_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with kept_offline(tmp_path):
        monkeypatch.setenv("COMET_MODE", "sometimes")
        assert quiet_trainer(tmp_path / "out", report_to="comet_ml", max_steps=1).train().global_step == 1
    assert "COMET_MODE=sometimes is none of get, get_or_create, create" in caplog.text
