from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import transformers
from tqdm.std import tqdm

from littrainer.callbacks import progress
from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.early_stopping import EarlyStoppingCallback
from littrainer.callbacks.progress import (
    PrinterCallback,
    ProgressCallback,
    default_progress_callback,
    format_log_line,
    format_logs,
    get_progress_label,
)
from littrainer.callbacks.state import TrainerControl, TrainerState
from littrainer.checkpoint.weights import write_weights
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.models import tiny_bert_classifier
from tests.scenarios.trainers import quiet_trainer

LOGS: dict[str, Any] = {
    "loss": 0.123456,
    "grad_norm": 12345678.9,
    "learning_rate": 1e-5,
    "step": 3,
    "name": "text",
    "total_flos": 1e12,
    "none": None,
}


class Bars:
    """Factory that records silent progress bars."""

    def __init__(self) -> None:
        self.created: list[Any] = []
        self.written: list[str] = []

    def __call__(self, **keywords: Any) -> Any:
        bar: Any = tqdm(file=io.StringIO(), mininterval=0, **keywords)
        bar.write = self.written.append
        self.created.append(bar)
        return bar


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Bars:
    bars = Bars()
    monkeypatch.setattr(progress, "ProgressBar", bars)
    return bars


@pytest.mark.parametrize("logs", [LOGS, {}], ids=["full", "empty"])
def test_logs_are_printed_as_transformers_prints_them(capsys: pytest.CaptureFixture[str], logs: dict[str, Any]) -> None:
    state: Any = TrainerState()
    control: Any = None
    printed = []
    for kind in (PrinterCallback, transformers.PrinterCallback):
        mine = dict(logs)
        kind().on_log(None, state, control, logs=mine)
        printed.append((capsys.readouterr().out, mine))
    assert printed[0] == printed[1]
    assert "total_flos" not in printed[0][1]


def test_long_texts_are_shown_by_their_length() -> None:
    shown = format_logs({"short": "a" * 5, "long": "a" * 6}, max_str_len=5)
    assert shown["short"] == "aaaaa" and "6" in shown["long"] and "aaaaaa" not in shown["long"]
    assert format_logs({"long": "a" * 600})["long"] == "a" * 600


def test_a_training_has_a_bar_of_its_steps_and_a_bar_of_each_evaluation(tmp_path: Path, bars: Bars) -> None:
    labels: list[str] = []

    class RecordsLabels(TrainerCallback):
        def on_log(self, *_: Any, **__: Any) -> None:
            labels.append(bars.created[0].desc.removesuffix(": "))

        on_save = on_log

    trainer = quiet_trainer(
        tmp_path,
        trainer_kwargs={
            "eval_dataset": {"near": Rows(vector_rows(7)), "far": Rows(vector_rows(3))},
            "callbacks": [RecordsLabels],
        },
        disable_tqdm=False,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        logging_strategy="steps",
        logging_steps=2,
        save_strategy="steps",
        save_steps=2,
    )
    trainer.train()
    evaluations = [("evaluation near", 3, 3, False), ("evaluation far", 1, 1, False)]
    assert [(bar.desc, bar.total, bar.n, bar.leave) for bar in bars.created] == [
        ("training: ", 4, 4, True),
        *evaluations * 2,
    ]
    # Three logs (a loss and two evaluations), then a save.
    assert labels == [*["training"] * 3, "saving"] * 2 + ["training"]
    assert all(bar.disable for bar in bars.created), "a bar that was closed is disabled"
    assert sum("'eval_near_loss'" in line for line in bars.written) == 2
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert bars.created[0].postfix == f"loss={last['loss']:.4g}, lr={last['learning_rate']:.4g}"
    assert "'train_loss'" in bars.written[-1] and "total_flos" not in bars.written[-1]


def test_a_pass_over_data_is_called_by_the_prefix_of_its_metrics() -> None:
    labels = {"eval": "evaluation", "eval_german_news": "evaluation german_news", "test": "prediction", "own": "own"}
    assert {prefix: get_progress_label(prefix) for prefix in labels} == labels
    assert get_progress_label("eval_german", generates=True) == "generation german"


STATE = TrainerState(global_step=20, max_steps=500)
SPEED = {"runtime": 1.23456, "samples_per_second": 321.098, "steps_per_second": 40.1}
LINES = {
    "step  20/500  epoch 0.04   training    loss 2.317      grad_norm 12.4       learning_rate 5e-05": {
        "loss": 2.3171,
        "grad_norm": 12.4,
        "learning_rate": 5e-5,
        "epoch": 0.04,
    },
    "step  20/500  epoch 1      evaluation  loss 0.5        accuracy 0.75       1.235 s  321.1 samples/s": {
        "eval_loss": 0.5,
        "eval_accuracy": 0.75,
        **{f"eval_{name}": value for name, value in SPEED.items()},
        "epoch": 1.0,
    },
    "step  20/500  epoch 1      finished    train_loss 0.25       1.235 s  321.1 samples/s": {
        "train_loss": 0.25,
        "total_flos": 1e9,
        "epoch": 1.0,
        **{f"train_{name}": value for name, value in SPEED.items()},
    },
}


@pytest.mark.parametrize("line", LINES)
def test_on_a_terminal_results_are_lines_in_columns(bars: Bars, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setenv("COLUMNS", "100")
    callback: Any = ProgressCallback()
    callback.on_train_begin(SimpleNamespace(), STATE, None)
    callback.on_log(None, STATE, None, logs=LINES[line])
    assert bars.written == [line] and len(line) <= 100


def test_a_terminal_shows_why_training_ended_and_which_checkpoint_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True, write=lines.append, flush=lambda: None))
    trainer = quiet_trainer(
        tmp_path,
        trainer_kwargs={"callbacks": [EarlyStoppingCallback(early_stopping_threshold=10.0)]},
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        max_steps=5,
        load_best_model_at_end=True,
        disable_tqdm=False,
    )
    trainer.train()
    best = trainer.state.best_model_checkpoint
    text = "".join(lines)
    assert "Early stopping at step 2 of 5: eval_loss did not improve for 1 evaluation.\n" in text
    assert f"The best checkpoint was loaded: {best} (loss " in text


def test_a_long_log_line_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = format_log_line({f"metric_{number}": number / 7 for number in range(20)}, STATE).splitlines()
    assert len(shown) > 3 and all(len(line) <= 100 for line in shown)
    assert all(line.startswith(" " * 14 + "metric_") for line in shown[1:])


@pytest.mark.parametrize("columns", [60, 100, 160])
def test_rows_break_at_the_same_columns_whatever_the_numbers(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shapes = set()
    for loss in (2.0, 0.0012345, 1.2345e-05):
        logs = {
            "loss": loss,
            "grad_norm": loss,
            "learning_rate": loss,
            "epoch": 0.5,
            **{f"m{n}": loss for n in range(6)},
        }
        lines = format_log_line(logs, STATE).splitlines()
        shapes.add(tuple(tuple(re.findall(r"[a-z_]+\d? ", line)) for line in lines))
        assert all(len(line) <= columns for line in lines)
    assert len(shapes) == 1


@pytest.mark.parametrize(("steps", "shown"), [(450, ["loss"]), (10**9, []), (450, ["loss", "lr", "samples/s"])])
def test_a_bar_has_at_least_twenty_characters(steps: int, shown: list[str]) -> None:
    columns = 80 if len(shown) < 3 else 160
    bar: Any = progress.ProgressBar(total=steps, desc="training", ncols=columns, file=io.StringIO())
    bar.set_postfix({"loss": "0.1234", "lr": "0.001824", "samples/s": "1234.5"}, refresh=False)
    bar.update(steps // 2)
    text = str(bar)
    assert len(text) <= columns and text.split("|")[1].strip()
    assert len(text.split("|")[1]) >= 20 and re.findall(r"([\w/]+)=", text) == shown
    bar.close()


@pytest.mark.parametrize(
    ("changes", "is_terminal", "shown"),
    [({}, False, False), ({}, True, True), ({"disable_tqdm": False}, False, True)],
)
def test_bars_are_drawn_on_a_terminal_or_where_a_script_asked_for_them(
    tmp_path: Path, bars: Bars, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], is_terminal: bool, shown: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    drawn: list[bool] = []

    class RecordsBar(TrainerCallback):
        def on_train_end(self, *_: Any, **__: Any) -> None:
            drawn.append(not bars.created[0].disable)

    arguments = {"disable_tqdm": None, "max_steps": 2, "logging_strategy": "steps", "logging_steps": 1, **changes}
    quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [RecordsBar]}, **arguments).train()
    assert drawn == [shown]
    assert sum("'loss'" in line for line in bars.written) == 2, "the logs are written in any case"


def test_bars_outside_training_stay_and_are_closed(tmp_path: Path, bars: Bars) -> None:
    trainer = quiet_trainer(tmp_path, disable_tqdm=False)
    trainer.evaluate()
    trainer.predict(Rows(vector_rows(4)))
    # Without a length there is no bar.
    trainer.evaluate(Stream(vector_rows(4)))
    assert [(bar.total, bar.n, bar.leave) for bar in bars.created] == [(3, 3, True), (2, 2, True)]
    assert all(bar.disable for bar in bars.created) and bars.written == []


def test_a_resumed_training_shows_the_steps_done_before(bars: Bars) -> None:
    callback: Any = ProgressCallback()
    args: Any = SimpleNamespace(_asked_for_bars=True)
    callback.on_train_begin(args, TrainerState(max_steps=10, global_step=6), None)
    callback.on_step_end(None, TrainerState(global_step=7), TrainerControl())
    assert bars.created[0].n == 7


def test_other_processes_show_no_bar(bars: Bars) -> None:
    callback: Any = ProgressCallback()
    state = TrainerState(max_steps=10, is_world_process_zero=False)
    for event in ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_predict", "on_train_end"):
        getattr(callback, event)(None, state, TrainerControl(), logs={"loss": 1.0})
    callback.on_prediction_step(None, state, None, eval_dataloader=[1])
    assert bars.created == [] and bars.written == []


def test_a_save_draws_no_bar_over_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_bert_classifier()
    drawn = []
    for write in (model.save_pretrained, lambda folder: write_weights(model, folder), model.save_pretrained):
        write(tmp_path)
        drawn.append("Writing model shards" in capsys.readouterr().err)
    # transformers' own saves draw it before and after.
    assert drawn == [True, False, True]


# ---- Notebooks -------------------------------------------------------------------------------------------------------


CELL = re.compile(r"<(?:th|td)>(.*?)</(?:th|td)>", re.DOTALL)


class Screen(ModuleType):
    """Fake `IPython.display` with the last HTML of each output."""

    def __init__(self) -> None:
        super().__init__("IPython.display")
        self.outputs: list[str] = []

    def HTML(self, text: str) -> str:
        return text

    def display(self, html: str, display_id: bool = False) -> Any:
        index = len(self.outputs)
        self.outputs.append(html)
        return SimpleNamespace(update=lambda changed: self.outputs.__setitem__(index, changed))


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Install a fake notebook output in place of IPython's."""
    screen: Any = Screen()
    kernel: Any = ModuleType("IPython")
    kernel.get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})
    kernel.display = screen
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", screen)
    # Import it again, with the fake display.
    monkeypatch.delitem(sys.modules, "transformers.utils.notebook", raising=False)
    return screen


def rows_of(html: str) -> list[list[str]]:
    return [CELL.findall(row) for row in re.findall(r"<tr[^>]*>(.*?)</tr>", html, re.DOTALL)]


def test_in_a_notebook_transformers_table_shows_losses_and_metrics(tmp_path: Path, screen: Screen) -> None:
    kind = default_progress_callback()
    assert kind.__module__ == "transformers.utils.notebook"
    trainer = quiet_trainer(
        tmp_path,
        trainer_kwargs={"callbacks": [kind]},
        max_steps=4,
        logging_strategy="steps",
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    history = trainer.state.log_history
    losses = [f"{entry['loss']:.6f}" for entry in history if "loss" in entry]
    evaluated = [f"{entry['eval_loss']:.6f}" for entry in history if "eval_loss" in entry]
    head, *lines = rows_of(screen.outputs[0])
    assert head[:3] == ["Step", "Training Loss", "Validation Loss"]
    assert [line[:3] for line in lines] == [["2", losses[0], evaluated[0]], ["4", losses[1], evaluated[1]]]


def test_the_table_is_chosen_in_a_notebook_only(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: Any = sys.modules["IPython"]
    assert default_progress_callback() is not ProgressCallback
    for shell in (SimpleNamespace(config={"TerminalIPythonApp": {}}), None):
        kernel.get_ipython = lambda shell=shell: shell
        assert default_progress_callback() is ProgressCallback
    monkeypatch.setitem(sys.modules, "transformers.utils.notebook", None)
    monkeypatch.setattr(progress, "is_in_notebook", lambda: True)
    assert default_progress_callback() is ProgressCallback


def test_a_new_training_closes_the_bars_of_a_failed_training(bars: Bars) -> None:
    callback: Any = ProgressCallback()
    args = SimpleNamespace(_asked_for_bars=True)
    for _ in range(2):
        callback.on_train_begin(args, TrainerState(max_steps=3), None)
        callback.on_prediction_step(args, TrainerState(), None, eval_dataloader=[1, 2])
    assert [(bar.total, bar.disable) for bar in bars.created] == [(3, True), (2, True), (3, False), (2, False)]
