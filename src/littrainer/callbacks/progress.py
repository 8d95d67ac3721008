"""What a user sees while training runs: a progress bar, the logs as lines, or in a notebook a bar over a table."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from tqdm.auto import tqdm

from littrainer.arguments.choices import IntervalStrategy
from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.state import TrainerControl, TrainerState
from littrainer.data.loaders import has_length

# Logged value -> its name beside the training's bar.
BESIDE_THE_BAR = {"loss": "loss", "learning_rate": "lr"}
# Endings of metrics' names that say how fast an evaluation was, and stay out of the table.
NOT_IN_TABLE = ("_runtime", "_per_second", "_model_preparation_time", "_mem_cpu_peaked_delta", "_mem_cpu_alloc_delta")
TRAINING_LOSS, VALIDATION_LOSS = "Training Loss", "Validation Loss"
NOT_LOGGED = "No log"


def readable(logs: dict[str, Any], max_str_len: int | None = None) -> dict[str, Any]:
    """Logs for a terminal: numbers in four digits, no `total_flos`, long strings replaced by their length."""
    shown: dict[str, Any] = {}
    for name, value in logs.items():
        if name == "total_flos":
            continue
        if isinstance(value, float):
            value = f"{value:.4g}"
        elif isinstance(value, str) and max_str_len is not None and len(value) > max_str_len:
            value = f"[a string of {len(value)} characters, more than max_str_len={max_str_len}]"
        shown[name] = value
    return shown


def shows_bars(args: Any) -> bool:
    """Whether bars are drawn: on a terminal, and wherever a script asked for them with `disable_tqdm=False`."""
    # A library may hand its own arguments to callbacks.
    return getattr(args, "_asked_for_bars", False) or (sys.stderr is not None and sys.stderr.isatty())


class ProgressCallback(TrainerCallback):
    """A tqdm bar over the optimizer steps, one over each evaluation, and the logs written above them.

    The training's bar shows the last logged loss and learning rate beside its steps per second. Where stderr is no
    terminal, and nobody asked for bars, only the logs are written.

    Parameters:
        max_str_len: characters up to which a logged string is shown.
    """

    def __init__(self, max_str_len: int = 100):
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self.max_str_len = max_str_len
        self.current_step = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the training bar."""
        self.current_step = 0
        # That of an evaluation that an error ended.
        self._close_bars()
        if state.is_world_process_zero:
            self.training_bar = self._new_bar(args, state.max_steps)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the training bar; after a resume it jumps to the step that training is at."""
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.current_step)
            self.current_step = state.global_step

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Move the evaluation bar; there is none over a dataset of unknown length."""
        if not state.is_world_process_zero or not has_length(eval_dataloader):
            return
        if self.prediction_bar is None:
            self.prediction_bar = self._new_bar(args, len(eval_dataloader), leave=self.training_bar is None)
        self.prediction_bar.update(1)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the evaluation bar."""
        self._close_prediction_bar()

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # type: ignore[override]
        """Close the evaluation bar."""
        self._close_prediction_bar()

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Write the logs above the bar, and loss and learning rate beside it."""
        if self.training_bar is not None and logs is not None:
            beside = {name: logs[key] for key, name in BESIDE_THE_BAR.items() if key in logs}
            if beside:
                self.training_bar.set_postfix(readable(beside), refresh=False)
            self.training_bar.write(str(readable(logs, self.max_str_len)))

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the training bar, and that of an evaluation that was broken off."""
        self._close_bars()

    def on_training_failed(self, args: Any, state: TrainerState, error: BaseException) -> None:
        """Close the bars, which would spoil what is printed later."""
        self._close_bars()

    def _new_bar(self, args: Any, total: int, **keywords: Any) -> Any:
        if not shows_bars(args):
            keywords["disable"] = True
        return tqdm(total=total, dynamic_ncols=True, **keywords)

    def _close_bars(self) -> None:
        self._close_prediction_bar()
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def _close_prediction_bar(self) -> None:
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None


class PrinterCallback(TrainerCallback):
    """Prints the logs, one line each time, where progress bars are switched off."""

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Print the logs on the first process of each node."""
        if logs is None:
            return
        # The dict is the one that train() returns as its metrics; transformers' printer takes the operations out of it,
        # and scripts write what is left to their results files.
        logs.pop("total_flos", None)
        if state.is_local_process_zero:
            print(readable(logs))


# ---- Notebooks -------------------------------------------------------------------------------------------------------


def in_notebook() -> bool:
    """Whether this is a notebook in which HTML can be shown: a Jupyter kernel, Colab, or marimo with IPython."""
    if "marimo" in sys.modules:
        return importlib.util.find_spec("IPython") is not None
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def default_progress_callback() -> type[TrainerCallback]:
    """The callback that shows progress where this process runs."""
    return NotebookProgressCallback if in_notebook() else ProgressCallback


def format_time(seconds: float) -> str:
    """Seconds as minutes and seconds, with hours where there are any."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def html_progress_bar(value: float, total: float, prefix: str, label: str, width: int = 300) -> str:
    """HTML of a bar with a text before and after it; `width` in pixels."""
    bar = f'<progress value="{value}" max="{total}" style="width:{width}px; vertical-align:middle"></progress>'
    return f"<div>{escape(prefix)} {bar} {escape(label)}</div>"


def text_to_html_table(items: Sequence[Iterable[Any]]) -> str:
    """HTML of a table whose first row is the head; floats with six digits behind the point."""
    head, *rows = items
    lines = [_html_row(head, "th"), *(_html_row(row, "td") for row in rows)]
    return f'<table class="dataframe" border="1"><thead>{lines[0]}</thead><tbody>{"".join(lines[1:])}</tbody></table>'


def _html_row(cells: Iterable[Any], tag: str) -> str:
    texts = (f"{cell:.6f}" if isinstance(cell, float) else str(cell) for cell in cells)
    return f"<tr>{''.join(f'<{tag}>{escape(text)}</{tag}>' for text in texts)}</tr>"


class NotebookProgressBar:
    """A bar in the output of a notebook's cell.

    Parameters:
        total: the value at which it is full.
        prefix: text before the bar.
        leave: whether it stays when it is full.
        parent: the tracker in whose output it is shown, instead of one of its own.
        width: pixels.
    """

    # Drawing takes far longer than a short step.
    update_every_seconds = 0.2

    def __init__(
        self,
        total: int,
        prefix: str | None = None,
        leave: bool = True,
        parent: NotebookTrainingTracker | None = None,
        width: int = 300,
    ):
        self.total = total
        self.prefix = prefix or ""
        self.leave = leave
        self.parent = parent
        self.width = width
        self.value: int | None = None
        self.comment = ""
        self.label = ""
        self.html_code = ""
        self.output: Any = None
        self._began_at = self._drawn_at = 0.0
        self._first_value = 0

    def update(self, value: int, force_update: bool = False, comment: str | None = None) -> None:
        """Move the bar; it is drawn at most every `update_every_seconds`, when it is full, and when it has to be."""
        now = time.monotonic()
        is_first = self.value is None
        if is_first:
            self._began_at, self._first_value = now, value
        self.value = value
        self.comment = self.comment if comment is None else comment
        if is_first or force_update or value >= self.total or now - self._drawn_at >= self.update_every_seconds:
            self._drawn_at = now
            self.label = self._label(value, now - self._began_at)
            self.display()
            if value >= self.total and not self.leave:
                self.close()

    def _label(self, value: int, seconds: float) -> str:
        parts = [f"{value}/{self.total}"]
        done = value - self._first_value
        if done > 0 and seconds > 0:
            rate = done / seconds
            left = f" < {format_time((self.total - value) / rate)}" if value < self.total else ""
            parts = [f"{parts[0]} {format_time(seconds)}{left}", f"{rate:.2f} it/s"]
        return f"[{', '.join([*parts, self.comment] if self.comment else parts)}]"

    def display(self) -> None:
        """Draw the bar, in the parent's output where it has one."""
        self.html_code = html_progress_bar(self.value or 0, self.total, self.prefix, self.label, self.width)
        if self.parent is not None:
            self.parent.display()
        else:
            self._show(self.html_code)

    def close(self) -> None:
        """Take the bar out of the cell's output."""
        if self.parent is None and self.output is not None:
            self._show("")

    def _show(self, html: str) -> None:
        from IPython.display import HTML, display

        if self.output is None:
            self.output = display(HTML(html), display_id=True)
        else:
            self.output.update(HTML(html))


class NotebookTrainingTracker(NotebookProgressBar):
    """The bar of a training with a table of what was logged below it, and below that the bar of an evaluation.

    Parameters:
        num_steps: optimizer steps of the training.
        column_names: head of the table; by default the names in the first line.
    """

    def __init__(self, num_steps: int, column_names: list[str] | None = None):
        super().__init__(num_steps)
        self.inner_table: list[list[Any]] | None = None if column_names is None else [list(column_names)]
        self.child_bar: NotebookProgressBar | None = None

    def display(self) -> None:
        """Draw the bar, the table and the bar of a running evaluation."""
        bar = html_progress_bar(self.value or 0, self.total, self.prefix, self.label, self.width)
        table = "" if self.inner_table is None else text_to_html_table(self.inner_table)
        child = "" if self.child_bar is None else self.child_bar.html_code
        self.html_code = bar + table + child
        self._show(self.html_code)

    def write_line(self, values: dict[str, Any]) -> None:
        """Add a line to the table, or complete the last one where its first column is the same."""
        if self.inner_table is None:
            self.inner_table = [list(values)]
        head, rows = self.inner_table[0], self.inner_table[1:]
        head.extend(name for name in values if name not in head)
        last = dict(zip(head, rows[-1], strict=False)) if rows else {}
        if rows and last.get(head[0]) == values.get(head[0]):
            values = {**last, **values}
            rows.pop()
        rows.append([values.get(name, NOT_LOGGED) for name in head])
        self.inner_table = [head, *rows]

    def add_child(self, total: int, prefix: str | None = None, width: int = 300) -> NotebookProgressBar:
        """A bar below the table."""
        self.child_bar = NotebookProgressBar(total, prefix=prefix, parent=self, width=width)
        return self.child_bar

    def remove_child(self) -> None:
        """Take the bar below the table away."""
        self.child_bar = None
        self.display()


class NotebookProgressCallback(TrainerCallback):
    """A bar over the optimizer steps, a table of losses and metrics, and a bar over each evaluation."""

    def __init__(self) -> None:
        self.training_tracker: NotebookTrainingTracker | None = None
        self.prediction_bar: NotebookProgressBar | None = None
        self.first_column = "Step"
        self._force_next_update = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the bar and the table."""
        self.first_column = _first_column(args)
        if state.is_world_process_zero:
            columns = [self.first_column, TRAINING_LOSS]
            if args.eval_strategy != IntervalStrategy.NO:
                columns.append(VALIDATION_LOSS)
            self.training_tracker = NotebookTrainingTracker(state.max_steps, columns)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar."""
        if self.training_tracker is not None:
            self.training_tracker.update(
                state.global_step,
                comment=f"Epoch {_whole(state.epoch)}/{state.num_train_epochs}",
                force_update=self._force_next_update,
            )
            self._force_next_update = False

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Move the evaluation's bar; there is none over a dataset of unknown length."""
        if not state.is_world_process_zero or not has_length(eval_dataloader):
            return
        if self.prediction_bar is None:
            length, tracker = len(eval_dataloader), self.training_tracker
            self.prediction_bar = NotebookProgressBar(length) if tracker is None else tracker.add_child(length)
        self.prediction_bar.update((self.prediction_bar.value or 0) + 1)

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # type: ignore[override]
        """Close the prediction's bar."""
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Write the loss as a line, where no evaluation will."""
        if self.training_tracker is not None and args.eval_strategy == IntervalStrategy.NO and "loss" in (logs or {}):
            # A table without evaluations goes by steps.
            self.training_tracker.write_line({"Step": state.global_step, TRAINING_LOSS: (logs or {})["loss"]})
            self._force_next_update = True

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the metrics as a line of the table; outside of training as a table of their own."""
        if not state.is_world_process_zero:
            return
        self.first_column = _first_column(args)
        at = state.global_step if self.first_column == "Step" else _whole(state.epoch)
        losses = (entry["loss"] for entry in reversed(state.log_history) if "loss" in entry)
        values = {self.first_column: at, TRAINING_LOSS: next(losses, NOT_LOGGED), **_columns(metrics or {})}
        if self.training_tracker is not None:
            self.training_tracker.write_line(values)
            self.training_tracker.remove_child()
            self._force_next_update = True
        else:
            from IPython.display import HTML, display

            if self.prediction_bar is not None:
                self.prediction_bar.close()
            display(HTML(text_to_html_table([list(values), list(values.values())])))
        self.prediction_bar = None

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Draw the bar and the table for the last time."""
        if self.training_tracker is not None:
            self.training_tracker.child_bar = None
            self.training_tracker.update(
                state.global_step, force_update=True, comment=f"Epoch {_whole(state.epoch)}/{state.num_train_epochs}"
            )
        self.training_tracker = self.prediction_bar = None

    def on_training_failed(self, args: Any, state: TrainerState, error: BaseException) -> None:
        """Leave bar and table as they are, without the bar of an evaluation; what comes later has its own output."""
        tracker, self.training_tracker, self.prediction_bar = self.training_tracker, None, None
        if tracker is not None and tracker.child_bar is not None:
            tracker.remove_child()


def _first_column(args: Any) -> str:
    return "Epoch" if args.eval_strategy == IntervalStrategy.EPOCH else "Step"


def _whole(epoch: float) -> int | str:
    return int(epoch) if epoch == int(epoch) else f"{epoch:.2f}"


def _columns(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics under the table's heads: `eval_loss` is the validation loss, `eval_f1_macro` is "F1 Macro"."""
    columns = {}
    for name, value in metrics.items():
        if name in ("epoch", "total_flos") or name.endswith(NOT_IN_TABLE):
            continue
        words = name.split("_")[1:] or [name]
        columns[VALIDATION_LOSS if words == ["loss"] else " ".join(word.capitalize() for word in words)] = value
    return columns
