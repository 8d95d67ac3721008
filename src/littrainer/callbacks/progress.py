"""The output of a running training: labelled progress bars, and the logs as lines."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from tqdm.auto import tqdm

from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.log_history import SPEED_PREFIX
from littrainer.callbacks.state import TrainerControl, TrainerState
from littrainer.data.loaders import has_length

# Logged value -> its name at the end of the training's bar.
POSTFIX_NAMES = {"loss": "loss", "learning_rate": "lr", f"{SPEED_PREFIX}samples_per_second": "samples/s"}
# Ends the bar: tqdm's own forecast leaves out evaluations and saves.
REMAINING_SECONDS_KEY = f"{SPEED_PREFIX}seconds_left"
TRAINING, SAVING = "training", "saving"
# Prefix of metrics -> their source, as bars and lines of results name it.
LABELS = {"eval": "evaluation", "test": "prediction"}
# Speeds among the results -> their unit, which says enough without the name.
UNITS = {"runtime": "s", "samples_per_second": "samples/s"}
# Left out of lines, since the bar shows it.
SHOWN_BY_BARS = "steps_per_second"
MAX_COLUMNS = 100
# Between a name and its value, where a line must not break.
NO_BREAK = "\N{NO-BREAK SPACE}"


def format_logs(logs: dict[str, Any], max_str_len: int | None = None) -> dict[str, Any]:
    """Return logs with numbers in four digits, without `total_flos`, and with the length in place of long strings."""
    shown: dict[str, Any] = {}
    for name, value in logs.items():
        if name == "total_flos":
            continue
        is_long = isinstance(value, str) and max_str_len is not None and len(value) > max_str_len
        if is_long:
            value = f"[a string of {len(value)} characters, more than max_str_len={max_str_len}]"
        shown[name] = f"{value:.4g}" if isinstance(value, float) else value
    return shown


def get_progress_label(prefix: str, generates: bool = False) -> str:
    """Return the label of an evaluation by the prefix of its metrics: `eval_german` is `evaluation german`.

    Parameters:
        generates: whether it generates text, which takes most of its time.
    """
    split, _, name = prefix.partition("_")
    label = "generation" if generates else LABELS.get(split)
    return prefix if label is None else f"{label} {name}".rstrip()


def format_log_line(logs: dict[str, Any], state: TrainerState, max_str_len: int | None = None) -> str:
    """Return logs as one line in columns for a terminal; if it is too wide, it continues in the next line."""
    shown = format_logs(logs, max_str_len)
    # Each evaluation logs its duration.
    prefix = next((name.removesuffix("_runtime") for name in shown if name.endswith("_runtime")), "")
    label = {"": TRAINING, "train": "finished"}.get(prefix) or get_progress_label(prefix)
    step = f"step{NO_BREAK}{state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"
    cells = [step, f"epoch{NO_BREAK}{shown.pop('epoch', ''):<5}", f"{label:<10}"]
    for name, value in shown.items():
        short = name.removeprefix(f"{prefix}_")
        if short in UNITS:
            cells.append(f"{value}{NO_BREAK}{UNITS[short]}")
        elif short != SHOWN_BY_BARS and not name.startswith(SPEED_PREFIX):
            cells.append(f"{name if prefix == 'train' else short}{NO_BREAK}{value!s:<9}")
    width = min(MAX_COLUMNS, shutil.get_terminal_size((MAX_COLUMNS, 0)).columns)
    line = textwrap.fill("  ".join(cells), width, subsequent_indent=" " * (len(step) + 2))
    return line.replace(NO_BREAK, " ")


def should_show_bars(args: Any) -> bool:
    """Return whether bars are drawn: on a terminal, or because a script has set `disable_tqdm=False`."""
    # A library may pass other arguments to callbacks.
    return getattr(args, "_asked_for_bars", False) or (sys.stderr is not None and sys.stderr.isatty())


class ProgressCallback(TrainerCallback):
    """A tqdm bar over the optimizer steps, one over each evaluation, and the logs written above them.

    The training's bar ends in the last logged loss and learning rate. On a terminal the logs are lines in columns;
    in a file or a pipe they are printed as transformers prints them, for programs that read them. If stderr is not a
    terminal, and the script has not set `disable_tqdm=False`, only the logs are printed.

    Parameters:
        max_str_len: characters up to which a logged string is shown.
    """

    def __init__(self, max_str_len: int = 100):
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self.prediction_label = LABELS["eval"]
        self.max_str_len = max_str_len
        self.current_step = 0
        self._label = TRAINING

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the training bar."""
        self.current_step = 0
        # An evaluation that an error ended has left its bar.
        self._close_bars()
        if state.is_world_process_zero:
            self._label = TRAINING
            self.training_bar = self._new_bar(args, state.max_steps, self._label)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the training bar; after a resume it jumps to the step that training is at."""
        if self.training_bar is not None:
            self._name_training_bar(SAVING if control.should_save and not control.should_evaluate else TRAINING)
            self.training_bar.update(state.global_step - self.current_step)
            self.current_step = state.global_step

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show in the training bar that a checkpoint is written, if that comes next."""
        if control.should_save and not control.should_evaluate:
            self._name_training_bar(SAVING)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show in the training bar that training continues."""
        self._name_training_bar(TRAINING)

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Move the evaluation bar; there is none over a dataset of unknown length."""
        if not state.is_world_process_zero or not has_length(eval_dataloader):
            return
        if self.prediction_bar is None:
            leave = self.training_bar is None
            self._name_training_bar(TRAINING)
            self.prediction_bar = self._new_bar(args, len(eval_dataloader), self.prediction_label, leave=leave)
        self.prediction_bar.update(1)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the evaluation bar."""
        self._close_prediction_bar()
        if control.should_save:
            self._name_training_bar(SAVING)

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # type: ignore[override]
        """Close the evaluation bar."""
        self._close_prediction_bar()

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Write the logs above the bar, and loss and learning rate after it."""
        if self.training_bar is not None and logs is not None:
            after = {name: logs[key] for key, name in POSTFIX_NAMES.items() if key in logs}
            if REMAINING_SECONDS_KEY in logs:
                after["left"] = tqdm.format_interval(logs[REMAINING_SECONDS_KEY])
            if after:
                self.training_bar.set_postfix(format_logs(after), refresh=False)
            if sys.stdout is not None and sys.stdout.isatty():
                self.training_bar.write(format_log_line(logs, state, self.max_str_len))
            else:
                self.training_bar.write(str(format_logs(logs, self.max_str_len)))

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the training bar, and that of an interrupted evaluation."""
        self._close_bars()

    def on_training_failed(self, args: Any, state: TrainerState, error: BaseException) -> None:
        """Close the bars, which would spoil what is printed later."""
        self._close_bars()

    def _new_bar(self, args: Any, total: int, label: str, **keywords: Any) -> Any:
        if not should_show_bars(args):
            keywords["disable"] = True
        return tqdm(total=total, desc=label, dynamic_ncols=True, **keywords)

    def _name_training_bar(self, label: str) -> None:
        if self.training_bar is not None and label != self._label:
            self._label = label
            self.training_bar.set_description(label)

    def _close_bars(self) -> None:
        self._close_prediction_bar()
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def _close_prediction_bar(self) -> None:
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None


def label_evaluation_bar(callbacks: Iterable[Any], label: str) -> None:
    """Set the label of the next evaluation in the bars among callbacks."""
    for callback in callbacks:
        if isinstance(callback, ProgressCallback):
            callback.prediction_label = label


class PrinterCallback(TrainerCallback):
    """Prints the logs, one line each time, if progress bars are switched off."""

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
            print(format_logs(logs))


def is_in_notebook() -> bool:
    """Return whether this is a notebook that shows HTML: a Jupyter kernel, Colab, or marimo with IPython."""
    if "marimo" in sys.modules:
        return importlib.util.find_spec("IPython") is not None
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def default_progress_callback() -> type[Any]:
    """Return the class that shows progress here: in a notebook transformers' table, if transformers is installed."""
    if is_in_notebook():
        with suppress(ImportError):
            from transformers.utils.notebook import NotebookProgressCallback

            return NotebookProgressCallback
    return ProgressCallback
