import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

comet_ml = pytest.importorskip("comet_ml", reason="`make test-trackers` installs comet_ml")

from tests.tracking.both_sides import SIDES, comparable_arguments, same_on_both_machines, trainer_of  # noqa: E402

UNSET = ("COMET_API_KEY", "COMET_MODE", "COMET_EXPERIMENT_KEY", "COMET_LOG_ASSETS", "COMET_PROJECT_NAME")


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder to which comet_ml writes, without a network."""
    with kept_offline(tmp_path) as folder:
        yield folder


class kept_offline:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "comet"
        self.folder.mkdir(parents=True)
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> Path:
        for name in UNSET:
            self.patch.delenv(name, raising=False)
        self.patch.setenv("COMET_START_ONLINE", "False")
        self.patch.setenv("COMET_OFFLINE_DIRECTORY", str(self.folder))
        return self.folder

    def __exit__(self, *exception: Any) -> None:
        if comet_ml.get_running_experiment() is not None:
            comet_ml.end()
        self.patch.undo()


def messages_in(folder: Path) -> list[dict[str, Any]]:
    """What the one experiment in a folder would send, read from its archive after it has ended."""
    comet_ml.end()
    (archive,) = folder.glob("*.zip")
    with zipfile.ZipFile(archive) as files:
        lines = files.read("messages.json").decode().splitlines()
    return [json.loads(line) for line in lines]


def metrics_in(messages: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for message in messages:
        metric = message["payload"].get("metric")
        if message["type"] == "metric_msg" and not metric["metricName"].startswith("sys."):
            found.setdefault(metric["metricName"], []).append((message["payload"]["step"], float(metric["metricValue"])))
    return found
