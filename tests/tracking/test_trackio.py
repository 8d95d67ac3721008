import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trackio
from trackio.sqlite_storage import SQLiteStorage

from littrainer import TrainerCallback
from littrainer.tracking.trackio import TrackioCallback, static_space_name
from tests.scenarios.trainers import quiet_trainer
from tests.tracking.stores import kept_in


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with kept_in(tmp_path_factory.mktemp("trackio")):
        yield


def test_an_evaluation_after_training_belongs_to_its_run_and_a_second_training_has_its_own(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, report_to="trackio", project="unnamed", max_steps=1)
    trainer.train()
    trainer.evaluate()
    assert len(SQLiteStorage.get_runs("unnamed")) == 1
    trainer.train()
    assert len(SQLiteStorage.get_runs("unnamed")) == 2


def test_a_training_that_fails_finishes_its_run(tmp_path: Path) -> None:
    class Breaks(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError("broken")

    trainer = quiet_trainer(tmp_path, report_to="trackio", max_steps=2, given={"callbacks": [Breaks()]})
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert trackio.context_vars.current_run.get() is None


class FakeHub:
    """Trackio on a Space, without the Hub: notes what is asked of it."""

    def __init__(self, space_id: str | None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        variable = SimpleNamespace(get=lambda: space_id)
        self.context_vars = SimpleNamespace(current_space_id=variable, current_project=SimpleNamespace(get=lambda: "p"))
        self.config: dict[str, Any] = _Config()

    def init(self, **keywords: Any) -> Any:
        self.calls.append(("init", keywords))
        return SimpleNamespace(name="a run")

    def log(self, values: dict[str, Any]) -> None:
        pass

    def finish(self) -> None:
        self.calls.append(("finish", {}))

    def freeze(self, **keywords: Any) -> str:
        self.calls.append(("freeze", keywords))
        return "me/frozen"

    def sync(self, **keywords: Any) -> str:
        self.calls.append(("sync", keywords))
        return "me/synced"


class _Config(dict[str, Any]):
    def update(self, values: dict[str, Any], allow_val_change: bool = False) -> None:  # type: ignore[override]
        super().update(values)


def test_arguments_name_the_space_its_bucket_and_the_static_one(tmp_path: Path) -> None:
    callback = TrackioCallback()
    callback._trackio = hub = FakeHub("me/space")
    trainer = quiet_trainer(
        tmp_path,
        given={"callbacks": [callback]},
        max_steps=1,
        project="p",
        trackio_space_id="space",
        trackio_bucket_id="bucket",
        trackio_static_space_id="me/static",
    )
    trainer.train()
    names = [name for name, _ in hub.calls]
    assert names == ["init", "finish", "freeze"]
    asked = hub.calls[0][1]
    assert (asked["space_id"], asked["bucket_id"], asked["project"]) == ("space", "bucket", "p")
    assert hub.calls[2][1]["new_space_id"] == "me/static"
    assert trainer.model.model_tags == ["trackio", "trackio:https://huggingface.co/spaces/me/frozen"]


def test_no_static_space_is_made_where_the_argument_is_false(tmp_path: Path) -> None:
    callback = TrackioCallback()
    callback._trackio = hub = FakeHub("me/space")
    trainer = quiet_trainer(tmp_path, given={"callbacks": [callback]}, max_steps=1, trackio_static_space_id=False)
    trainer.train()
    assert [name for name, _ in hub.calls] == ["init", "finish"]


def test_local_results_are_published_with_a_push(tmp_path: Path) -> None:
    callback = TrackioCallback()
    callback._trackio = hub = FakeHub(None)
    trainer = quiet_trainer(tmp_path, given={"callbacks": [callback]}, max_steps=1)
    trainer.train()
    assert callback.card_badge() is None
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    name, asked = hub.calls[-1]
    assert (name, asked["project"], asked["sdk"]) == ("sync", "p", "static")
    assert trainer.model.model_tags[-1].endswith("me/synced")
    assert "(https://huggingface.co/spaces/me/synced)" in str(callback.card_badge())


@pytest.mark.parametrize(
    ("project", "name"), [("My Run/2", "my-run-2"), ("//", "trackio-project"), ("a" * 99, "a" * 81), ("a.b_c", "a.b_c")]
)
def test_the_name_of_a_static_space_is_one_that_the_hub_takes(project: str, name: str) -> None:
    assert re.fullmatch(re.escape(name) + "-static-[0-9a-f]{6}", static_space_name(project))
