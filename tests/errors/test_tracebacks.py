from __future__ import annotations

import signal
import traceback
from pathlib import Path
from typing import Any

import pytest

from littrainer import Trainer, TrainerCallback
from littrainer.errors.tracebacks import FULL, SWITCH, ShortTraceback
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer


class OwnError(Exception):
    pass


class Failing(VectorClassifier):
    def __init__(self, in_evaluation: bool = False) -> None:
        super().__init__()
        self.in_evaluation = in_evaluation

    def forward(self, x: Any, labels: Any = None) -> Any:
        if self.training is not self.in_evaluation:
            self.raise_here()
        return super().forward(x, labels)

    def raise_here(self) -> None:
        here = 7  # noqa: F841
        raise OwnError("own")


def frames_of(error: BaseException) -> list[tuple[str, str]]:
    """Package and function of each entry of a traceback."""
    walked = traceback.walk_tb(error.__traceback__)
    return [(frame.f_globals["__name__"].partition(".")[0], frame.f_code.co_name) for frame, _ in walked]


def error_of(trainer: Trainer, method: str = "train", kind: type[BaseException] = OwnError) -> BaseException:
    with pytest.raises(kind) as caught:
        getattr(trainer, method)()
    return caught.value


def test_a_traceback_has_the_method_the_call_of_the_model_and_the_users_own_frames(tmp_path: Path) -> None:
    error = error_of(quiet_trainer(tmp_path, Failing()))
    assert frames_of(error) == [
        ("tests", "error_of"),
        ("littrainer", "with_earlier_keywords"),
        ("littrainer", "train"),
        ("littrainer", "loss_and_outputs"),
        ("torch", "_wrapped_call_impl"),
        ("torch", "_call_impl"),
        ("tests", "forward"),
        ("tests", "raise_here"),
    ]


def test_an_error_of_our_own_ends_at_the_method_that_was_called(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, given={"train_dataset": Rows([{"x": row["x"]} for row in vector_rows(4)])})
    error = error_of(trainer, kind=ValueError)
    assert [name for _, name in frames_of(error)] == ["error_of", "with_earlier_keywords", "train"]


def test_ctrl_c_ends_where_the_script_was(tmp_path: Path) -> None:
    class Interrupted(VectorClassifier):
        def forward(self, x: Any, labels: Any = None) -> Any:
            signal.raise_signal(signal.SIGINT)

    frames = frames_of(error_of(quiet_trainer(tmp_path, Interrupted()), kind=KeyboardInterrupt))
    assert frames[-1] == ("tests", "forward") and "lightning" not in {package for package, _ in frames}


@pytest.mark.parametrize("way", ["variable", "log level"])
def test_all_of_a_traceback_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "variable":
        monkeypatch.setenv(SWITCH, FULL)
    else:
        monkeypatch.setattr("littrainer.errors.tracebacks.tells_everything", lambda: True)
    frames = frames_of(error_of(quiet_trainer(tmp_path, Failing())))
    assert [package for package, _ in frames].count("lightning") > 4


def test_a_fault_of_ours_keeps_the_calls_that_led_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: Any) -> Any:
        return None + 1  # type: ignore[operator]

    # As if it stood in a module of ours.
    faulty.__globals__["__name__"], kept = "littrainer.training.loss", faulty.__globals__["__name__"]
    try:
        monkeypatch.setattr("littrainer.training.loss.normalised", faulty)
        error = error_of(quiet_trainer(tmp_path), kind=TypeError)
        packages = [package for package, _ in frames_of(error)]
    finally:
        faulty.__globals__["__name__"] = kept
    assert packages[-4:] == ["littrainer"] * 4 and "lightning" not in packages


def test_an_error_within_an_error_is_shortened_too(tmp_path: Path) -> None:
    class Translating(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            try:
                failing.train()
            except OwnError as error:
                raise KeyError("translated") from error

    failing = quiet_trainer(tmp_path / "inner", Failing())
    error = error_of(quiet_trainer(tmp_path, given={"callbacks": [Translating()]}), kind=KeyError)
    reason = error.__cause__
    assert isinstance(reason, OwnError)
    assert "lightning" not in {package for one in (error, reason) for package, _ in frames_of(one)}
    assert frames_of(reason)[-1] == ("tests", "raise_here")


def internal_function(source: str) -> Any:
    """A function `called` as if it stood in a module of ours."""
    names: dict[str, Any] = {"__name__": "littrainer.made_up"}
    exec(source, names)
    return names["called"]


def shortened(called: Any, kind: type[BaseException]) -> BaseException:
    with pytest.raises(kind) as caught, ShortTraceback():
        called()
    return caught.value


@pytest.mark.parametrize(
    ("kind", "ending"), [(KeyboardInterrupt, "signal.raise_signal(signal.SIGINT)"), (SystemExit, "raise SystemExit(4)")]
)
def test_an_end_within_our_code_is_no_fault_of_ours(kind: type[BaseException], ending: str) -> None:
    called = internal_function(
        f"import signal, sys\ndef called():\n    between()\ndef between():\n    last()\ndef last():\n    {ending}\n"
    )
    assert [name for _, name in frames_of(shortened(called, kind))][1:] == ["last"]
