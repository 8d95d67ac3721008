from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from littrainer import Trainer, TrainerCallback
from littrainer.runtime.tracebacks import FULL, SWITCH, print_instead, report_uncaught
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer


class UserError(Exception):
    pass


class Failing(VectorClassifier):
    def forward(self, x: Any, labels: Any = None) -> Any:
        self.raise_here()

    def raise_here(self) -> None:
        raise UserError("own")


def list_frames(error: BaseException) -> list[tuple[str, str]]:
    """Return package and function of each entry of a traceback."""
    entries = traceback.walk_tb(error.__traceback__)
    return [(frame.f_globals["__name__"].partition(".")[0], frame.f_code.co_name) for frame, _ in entries]


def catch_error(trainer: Trainer, method: str = "train", kind: type[BaseException] = UserError) -> BaseException:
    with pytest.raises(kind) as caught:
        getattr(trainer, method)()
    return caught.value


def test_a_traceback_has_the_called_method_the_call_of_the_model_and_the_users_frames(tmp_path: Path) -> None:
    error = catch_error(quiet_trainer(tmp_path, Failing()))
    assert list_frames(error) == [
        ("tests", "catch_error"),
        ("littrainer", "wrapper"),
        ("littrainer", "train"),
        ("littrainer", "compute_loss_and_outputs"),
        ("torch", "_wrapped_call_impl"),
        ("torch", "_call_impl"),
        ("tests", "forward"),
        ("tests", "raise_here"),
    ]


def test_an_error_of_littrainer_ends_at_the_call_that_raised_it(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path, trainer_kwargs={"train_dataset": Rows([{"x": row["x"]} for row in vector_rows(4)])}
    )
    frames = list_frames(catch_error(trainer, kind=ValueError))
    assert [name for _, name in frames] == ["catch_error", "wrapper", "train", "_extract_loss"]


@pytest.mark.parametrize("way", ["variable", "log level"])
def test_full_tracebacks_can_be_enabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "variable":
        monkeypatch.setenv(SWITCH, FULL)
    else:
        monkeypatch.setattr("littrainer.runtime.tracebacks.is_debug_logging_enabled", lambda: True)
    frames = list_frames(catch_error(quiet_trainer(tmp_path, Failing())))
    assert [package for package, _ in frames].count("lightning") > 4


def test_an_error_within_an_error_is_shortened_too(tmp_path: Path) -> None:
    class Translating(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            try:
                failing.train()
            except UserError as error:
                raise KeyError("translated") from error

    failing = quiet_trainer(tmp_path / "inner", Failing())
    error = catch_error(quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [Translating()]}), kind=KeyError)
    reason = error.__cause__
    assert isinstance(reason, UserError)
    assert "lightning" not in {package for link in (error, reason) for package, _ in list_frames(link)}
    assert list_frames(reason)[-1] == ("tests", "raise_here")


def test_a_hook_of_a_tracker_between_two_of_ours_reports_and_prints_an_error_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("littrainer.runtime.tracebacks._reports", [])
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: print(f"{error!r}", file=sys.stderr))
    reported: list[BaseException] = []
    report_uncaught(reported.append)
    ours = sys.excepthook
    sys.excepthook = lambda *parts: ours(*parts)
    interruption = KeyboardInterrupt()
    interruption.__cause__ = UserError("of the step")
    monkeypatch.setattr("littrainer.runtime.tracebacks.signal.signal", lambda *_: None)
    print_instead(interruption, ["interrupted"])
    assert sys.excepthook is not ours
    sys.excepthook(KeyboardInterrupt, interruption, None)
    assert reported == [interruption]
    assert capsys.readouterr().err.splitlines() == ["KeyboardInterrupt()", "interrupted"]
