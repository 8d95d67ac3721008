from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from littrainer.callbacks import progress
from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.progress import (
    NotebookProgressBar,
    NotebookProgressCallback,
    NotebookTrainingTracker,
    ProgressCallback,
    default_progress_callback,
    format_time,
    text_to_html_table,
)
from littrainer.callbacks.state import TrainerState
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.trainers import quiet_trainer

CELL = re.compile(r"<(?:th|td)>(.*?)</(?:th|td)>")


class Screen(ModuleType):
    """What `IPython.display` offers, and what it shows: the last HTML of each output."""

    def __init__(self) -> None:
        super().__init__("IPython.display")
        self.outputs: list[str] = []
        self.drawn = 0

    def HTML(self, text: str) -> str:
        return text

    def display(self, html: str, display_id: bool = False) -> Any:
        place = len(self.outputs)
        self.outputs.append(html)
        self.drawn += 1

        def update(changed: str) -> None:
            self.outputs[place] = changed
            self.drawn += 1

        return SimpleNamespace(update=update)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A notebook's output, in the place of IPython's."""
    screen: Any = Screen()
    kernel: Any = ModuleType("IPython")
    kernel.get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})
    kernel.display = screen
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", screen)
    return screen


def rows_of(html: str) -> list[list[str]]:
    return [CELL.findall(row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


def in_a_notebook(folder: Path, **changes: Any) -> Any:
    return quiet_trainer(
        folder,
        given={"callbacks": [NotebookProgressCallback]},
        **{"logging_strategy": "steps", "logging_steps": 2, **changes},
    )


def test_a_training_without_evaluations_shows_a_bar_and_its_losses(tmp_path: Path, screen: Screen) -> None:
    trainer = in_a_notebook(tmp_path, max_steps=4)
    trainer.train()
    losses = [f"{entry['loss']:.6f}" for entry in trainer.state.log_history if "loss" in entry]
    assert len(screen.outputs) == 1
    assert rows_of(screen.outputs[0]) == [["Step", "Training Loss"], ["2", losses[0]], ["4", losses[1]]]
    assert 'value="4" max="4"' in screen.outputs[0] and "Epoch 1.33/2" in screen.outputs[0]


def test_a_training_with_evaluations_shows_their_metrics_beside_the_loss(tmp_path: Path, screen: Screen) -> None:
    trainer = in_a_notebook(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2)
    trainer.compute_metrics = lambda predicted: {"macro_f1": 0.25, "note": "<b>&"}
    trainer.train()
    history = trainer.state.log_history
    losses = [f"{entry['loss']:.6f}" for entry in history if "loss" in entry]
    evaluated = [f"{entry['eval_loss']:.6f}" for entry in history if "eval_loss" in entry]
    (shown,) = screen.outputs
    head, first, last = rows_of(shown)
    assert head == ["Step", "Training Loss", "Validation Loss", "Macro F1", "Note"]
    assert first == ["2", losses[0], evaluated[0], "0.250000", "&lt;b&gt;&amp;"]
    assert last[:3] == ["4", losses[1], evaluated[1]]
    assert shown.count("<progress") == 1, "the evaluation's bar is gone"


def test_evaluations_by_epoch_are_lines_by_epoch_and_several_sets_share_one(tmp_path: Path, screen: Screen) -> None:
    trainer = in_a_notebook(tmp_path, num_train_epochs=2, eval_strategy="epoch")
    trainer.eval_dataset = {"near": Rows(vector_rows(3)), "far": Rows(vector_rows(4))}
    trainer.train()
    head, *lines = rows_of(screen.outputs[0])
    assert head == ["Epoch", "Training Loss", "Validation Loss", "Near Loss", "Far Loss"]
    assert [line[0] for line in lines] == ["1", "2"]
    assert all(line[2] == "No log" and line[3] != line[4] != "No log" for line in lines)


def test_work_outside_of_training_has_outputs_of_its_own(tmp_path: Path, screen: Screen) -> None:
    trainer = in_a_notebook(tmp_path)
    metrics = trainer.evaluate()
    assert screen.outputs[0] == "" and rows_of(screen.outputs[1])[1][2] == f"{metrics['eval_loss']:.6f}"
    assert "eval_runtime" in metrics
    trainer.predict(Rows(vector_rows(4)))
    assert screen.outputs[2:] == [""]


def test_what_follows_a_training_that_failed_has_an_output_of_its_own(tmp_path: Path, screen: Screen) -> None:
    class Breaks(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

    trainer = in_a_notebook(tmp_path)
    trainer.add_callback(Breaks())
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    shown = list(screen.outputs)
    trainer.evaluate()
    assert screen.outputs[: len(shown)] == shown
    assert "Validation Loss" in screen.outputs[-1]


def test_other_processes_show_nothing(screen: Screen) -> None:
    callback: Any = NotebookProgressCallback()
    args = SimpleNamespace(eval_strategy="no")
    state = TrainerState(max_steps=3, is_world_process_zero=False)
    callback.on_prediction_step(args, state, None, eval_dataloader=[1])
    for event in ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_predict", "on_train_end"):
        getattr(callback, event)(args, state, None, logs={"loss": 1.0}, metrics={"eval_loss": 1.0})
    assert screen.outputs == []


def test_a_bar_is_drawn_no_oftener_than_it_has_to(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    bar = NotebookProgressBar(50)
    for value in range(1, 20):
        bar.update(value)
    assert screen.drawn == 1
    now += 1
    bar.update(21, comment="half")
    assert screen.drawn == 2 and "21/50 00:01 &lt; 00:01, 20.00 it/s, half" in screen.outputs[0]
    bar.update(22, force_update=True)
    bar.update(50)
    assert screen.drawn == 4


def test_a_bar_that_shall_not_stay_goes_when_it_is_full(screen: Screen) -> None:
    bar = NotebookProgressBar(2, prefix="reading", leave=False)
    bar.update(1)
    assert "reading" in screen.outputs[0]
    bar.update(2)
    assert screen.outputs == [""]


def test_a_tracker_makes_its_table_of_the_first_line_if_it_has_no_columns(screen: Screen) -> None:
    tracker = NotebookTrainingTracker(3)
    tracker.write_line({"Step": 1, "Loss": 0.5})
    tracker.write_line({"Step": 2, "Loss": 0.25, "F1": 1})
    tracker.write_line({"Step": 2, "F1": 2})
    assert tracker.inner_table == [["Step", "Loss", "F1"], [1, 0.5], [2, 0.25, 2]]
    tracker.add_child(4).update(1)
    assert screen.outputs[0].count("<progress") == 2 and 'max="4"' in screen.outputs[0]
    tracker.remove_child()
    assert screen.outputs[0].count("<progress") == 1


@pytest.mark.parametrize(("seconds", "text"), [(0, "00:00"), (61.9, "01:01"), (3600, "1:00:00"), (36_125, "10:02:05")])
def test_seconds_are_shown_as_a_clock_shows_them(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


def test_a_table_has_a_head_and_escapes_what_it_shows() -> None:
    assert rows_of(text_to_html_table([["a", "<i>"], [1, 0.5]])) == [["a", "&lt;i&gt;"], ["1", "0.500000"]]


def test_the_table_is_chosen_in_a_notebook_only(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: Any = sys.modules["IPython"]
    assert default_progress_callback() is NotebookProgressCallback
    kernel.get_ipython = lambda: SimpleNamespace(config={"TerminalIPythonApp": {}})
    assert default_progress_callback() is ProgressCallback
    kernel.get_ipython = lambda: None
    assert default_progress_callback() is ProgressCallback
    monkeypatch.delitem(sys.modules, "IPython")
    assert default_progress_callback() is ProgressCallback


def test_marimo_shows_the_table_where_it_has_ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "marimo", ModuleType("marimo"))
    for has_ipython, expected in ((None, ProgressCallback), (object(), NotebookProgressCallback)):
        monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name, found=has_ipython: found)
        assert default_progress_callback() is expected


def test_a_subclass_that_calls_events_as_setfit_does_works(tmp_path: Path, screen: Screen) -> None:
    class Own(NotebookProgressCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            # A set, where a dict is meant.
            names: Any = {"loss" if name == "embedding_loss" else name for name in logs}
            super().on_log(args, state, control, logs=names, **kwargs)

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            assert self.training_tracker is not None
            self.training_tracker.write_line({"Training Loss": 1.0, self.first_column: state.global_step, "Own": 2})
            self.training_tracker.remove_child()
            self.prediction_bar = None
            self._force_next_update = True

    trainer = quiet_trainer(tmp_path, given={"callbacks": [Own]}, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert rows_of(screen.outputs[0])[1:] == [["1", "1.000000", "No log", "2"], ["2", "1.000000", "No log", "2"]]


def test_ipythons_own_display_takes_the_table() -> None:
    display = pytest.importorskip("IPython.display")
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell.instance()
    try:
        with capture_output() as captured:
            bar = NotebookTrainingTracker(2, ["Step", "Training Loss"])
            bar.update(1)
            bar.write_line({"Step": 1, "Training Loss": 0.5})
            bar.update(2)
        assert isinstance(bar.output, display.DisplayHandle)
        assert rows_of(captured.outputs[-1].data["text/html"]) == [["Step", "Training Loss"], ["1", "0.500000"]]
    finally:
        shell.clear_instance()
