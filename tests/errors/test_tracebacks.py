from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import Trainer, TrainerCallback
from littrainer.errors.tracebacks import FULL, SWITCH, ShortTraceback
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import LosslessClassifier, VectorClassifier
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


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}


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


@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_an_evaluation_has_a_traceback_as_short(tmp_path: Path, method: str) -> None:
    error = error_of(quiet_trainer(tmp_path, Failing(in_evaluation=True), **EVALUATED), method)
    frames = frames_of(error)
    assert "lightning" not in {package for package, _ in frames} and len(frames) <= 8
    assert frames[-2:] == [("tests", "forward"), ("tests", "raise_here")]


def test_a_debugger_stops_where_the_error_was_raised_and_finds_what_was_called(tmp_path: Path) -> None:
    error = error_of(quiet_trainer(tmp_path, Failing()))
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    assert frame.f_locals["here"] == 7 and frame.f_lineno == line
    modules = set()
    outer: Any = frame
    while outer is not None:
        modules.add(outer.f_globals["__name__"].partition(".")[0])
        outer = outer.f_back
    assert "lightning" in modules


def test_an_error_of_our_own_ends_at_the_method_that_was_called(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, given={"train_dataset": Rows([{"x": row["x"]} for row in vector_rows(4)])})
    error = error_of(trainer, kind=ValueError)
    assert [name for _, name in frames_of(error)] == ["error_of", "with_earlier_keywords", "train"]


def test_an_error_of_our_own_ends_at_the_method_that_an_override_calls(tmp_path: Path) -> None:
    class OwnTrainer(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    error = error_of(quiet_trainer(tmp_path, LosslessClassifier(), kind=OwnTrainer), kind=ValueError)
    assert frames_of(error)[-2:] == [("tests", "compute_loss"), ("littrainer", "compute_loss")]


def test_all_frames_of_the_users_stay_where_calls_go_to_and_fro(tmp_path: Path) -> None:
    class OwnTrainer(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    error = error_of(quiet_trainer(tmp_path, Failing(), kind=OwnTrainer))
    assert [name for package, name in frames_of(error) if package == "tests"] == [
        "error_of",
        "compute_loss",
        "forward",
        "raise_here",
    ]


def test_an_error_of_the_backward_pass_shows_who_began_it(tmp_path: Path) -> None:
    error = error_of(quiet_trainer(tmp_path, VectorClassifier().requires_grad_(False)), kind=RuntimeError)
    frames = frames_of(error)
    assert frames[3][1] == "backward" and frames[4][0] == "torch" and len(frames) <= 8


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


def test_an_error_that_a_callback_catches_is_left_alone(tmp_path: Path) -> None:
    seen = []

    class Catching(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with pytest.raises(OwnError) as caught:
                failing.train()
            seen.append(frames_of(caught.value))

    failing = quiet_trainer(tmp_path / "inner", Failing())
    quiet_trainer(tmp_path, given={"callbacks": [Catching()]}, max_steps=1).train()
    assert "lightning" in {package for package, _ in seen[0]}


def test_the_errors_of_a_group_are_shortened_each() -> None:
    groups = pytest.importorskip("builtins", reason="an interpreter")
    if not hasattr(groups, "ExceptionGroup"):
        pytest.skip("Python 3.10 has no groups of errors")

    def raise_one() -> None:
        with contextmanager_of_ours():
            raise OwnError("one")

    found: Any = None
    try:
        with ShortTraceback():
            try:
                raise_one()
            except OwnError as error:
                raise groups.ExceptionGroup("several", [error]) from None
    except Exception as error:
        found = error
    (one,) = found.exceptions
    assert isinstance(one, OwnError) and frames_of(one)[0][1].startswith("test_the_errors")


@contextmanager
def contextmanager_of_ours() -> Iterator[None]:
    with torch.no_grad():
        yield


def internal_function(source: str) -> Any:
    """A function `called` as if it stood in a module of ours."""
    names: dict[str, Any] = {"__name__": "littrainer.made_up"}
    exec(source, names)
    return names["called"]


def shortened(called: Any, kind: type[BaseException]) -> BaseException:
    with pytest.raises(kind) as caught, ShortTraceback():
        called()
    return caught.value


@pytest.mark.parametrize("within", [None, 3, ("text", None)], ids=["nothing", "a number", "texts"])
def test_an_error_that_is_no_group_may_have_anything_by_the_name_of_its_errors(within: Any) -> None:
    def called() -> None:
        error = OwnError("own")
        error.exceptions = within  # type: ignore[attr-defined]
        raise error

    assert frames_of(shortened(called, OwnError))[-1] == ("tests", "called")


def test_an_error_that_cannot_be_looked_at_comes_through() -> None:
    class Closed(Exception):
        def __getattr__(self, name: str) -> Any:
            raise LookupError(name)

    def called() -> None:
        raise Closed("own")

    assert str(shortened(called, Closed)) == "own"


@pytest.mark.parametrize(
    ("kind", "ending"), [(KeyboardInterrupt, "signal.raise_signal(signal.SIGINT)"), (SystemExit, "sys.exit(4)")]
)
def test_an_end_within_our_code_is_no_fault_of_ours(kind: type[BaseException], ending: str) -> None:
    called = internal_function(
        f"import signal, sys\ndef called():\n    between()\ndef between():\n    last()\ndef last():\n    {ending}\n"
    )
    assert [name for _, name in frames_of(shortened(called, kind))][1:] == ["last"]


def test_an_error_that_is_raised_again_keeps_the_frames_of_both_times() -> None:
    again = OwnError("again")

    def raise_again() -> None:
        raise again

    called = internal_function("def called(own=None):\n    return between(own)\ndef between(own):\n    return own()\n")
    for times in (1, 2):
        error = shortened(lambda: called(raise_again), OwnError)
        assert error is again
        assert [name for _, name in frames_of(error)].count("raise_again") == times
        assert "called" not in [name for _, name in frames_of(error)]
