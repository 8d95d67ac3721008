import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trackio
from trackio.sqlite_storage import SQLiteStorage

from littrainer import TrainerCallback
from littrainer.tracking.trackio import TrackioCallback, make_static_space_name
from tests.scenarios.trainers import quiet_trainer
from tests.tracking.services.stand_ins import Calls, Recorder
from tests.tracking.stores import redirect_store


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with redirect_store(tmp_path_factory.mktemp("trackio")):
        yield


def test_each_training_has_a_run_that_a_later_evaluation_uses_and_a_failure_ends(tmp_path: Path) -> None:
    class Failing(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError("broken")

    trainer = quiet_trainer(tmp_path, report_to="trackio", project="unnamed", max_steps=1)
    trainer.train()
    trainer.evaluate()
    assert len(SQLiteStorage.get_runs("unnamed")) == 1
    trainer.train()
    assert len(SQLiteStorage.get_runs("unnamed")) == 2
    trainer.add_callback(Failing())
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert trackio.context_vars.current_run.get() is None


class FakeHub(Recorder):
    """A stand-in for trackio with a Space that records its calls."""

    def __init__(self, space_id: str | None) -> None:
        super().__init__(Calls())
        variable = SimpleNamespace(get=lambda: space_id)
        self.context_vars = SimpleNamespace(current_space_id=variable, current_project=SimpleNamespace(get=lambda: "p"))
        self.config = SimpleNamespace(update=lambda values, allow_val_change: None)
        self.init = self.calls.recorder("init", SimpleNamespace(name="a run"))
        self.freeze = self.calls.recorder("freeze", "me/frozen")
        self.sync = self.calls.recorder("sync", "me/synced")

    def requests(self) -> dict[str, dict[str, Any]]:
        return {name: keywords for name, _, keywords in self.calls if name != "log"}


def train(folder: Path, space_id: str | None, **changes: Any) -> tuple[Any, TrackioCallback, FakeHub]:
    callback = TrackioCallback()
    callback._trackio = hub = FakeHub(space_id)
    trainer = quiet_trainer(folder, trainer_kwargs={"callbacks": [callback]}, max_steps=1, project="p", **changes)
    trainer.train()
    return trainer, callback, hub


def test_arguments_name_the_space_its_bucket_and_the_static_one(tmp_path: Path) -> None:
    names = {"trackio_space_id": "space", "trackio_bucket_id": "bucket", "trackio_static_space_id": "me/static"}
    trainer, _, hub = train(tmp_path, "me/space", **names)
    requests = hub.requests()
    assert list(requests) == ["init", "finish", "freeze"]
    assert [requests["init"][name] for name in ("space_id", "bucket_id", "project")] == ["space", "bucket", "p"]
    assert requests["freeze"]["new_space_id"] == "me/static"
    assert trainer.model.model_tags == ["trackio", "trackio:https://huggingface.co/spaces/me/frozen"]
    _, _, without = train(tmp_path, "me/space", trackio_static_space_id=False)
    assert list(without.requests()) == ["init", "finish"]


def test_local_results_are_published_with_a_push(tmp_path: Path) -> None:
    trainer, callback, hub = train(tmp_path, None)
    assert callback.card_badge() is None
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    requests = hub.requests()["sync"]
    assert (requests["project"], requests["sdk"]) == ("p", "static")
    assert trainer.model.model_tags[-1].endswith("me/synced")
    assert "(https://huggingface.co/spaces/me/synced)" in str(callback.card_badge())


@pytest.mark.parametrize(
    ("project", "name"), [("My Run/2", "my-run-2"), ("//", "trackio-project"), ("a" * 99, "a" * 81), ("a.b_c", "a.b_c")]
)
def test_the_name_of_a_static_space_is_valid(project: str, name: str) -> None:
    assert re.fullmatch(re.escape(name) + "-static-[0-9a-f]{6}", make_static_space_name(project))
