"""Progress bars and log lines of a running training."""

from __future__ import annotations

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

# Logged value -> name in the bar's postfix.
POSTFIX_NAMES = {"loss": "loss", "learning_rate": "lr", f"{SPEED_PREFIX}samples_per_second": "samples/s"}
# tqdm's estimate ignores evaluations and saves.
REMAINING_SECONDS_KEY = f"{SPEED_PREFIX}seconds_left"
TRAINING, SAVING = "training", "saving"
# Prefix of metrics -> label.
LABELS = {"eval": "evaluation", "test": "prediction"}
UNITS = {"runtime": "s", "samples_per_second": "samples/s"}
# Omitted from lines: the bar shows it.
SHOWN_BY_BARS = "steps_per_second"
# Width without a terminal.
DEFAULT_COLUMNS = 100
MIN_BAR_COLUMNS = 20
DEFAULT_BAR = "{l_bar}{bar}{r_bar}"
# Without steps per second.
SHORT_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
# Separates name and value without a line break, and pads columns, so that rows break at the same places.
NO_BREAK = "\N{NO-BREAK SPACE}"


def format_logs(logs: dict[str, Any], max_str_len: int | None = None) -> dict[str, Any]:
    """Return logs for printing: floats in four digits, the lengths of long strings, no `total_flos`."""
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
    """Return the label of an evaluation by the prefix of its metrics: `eval_german` is `evaluation german`."""
    split, _, name = prefix.partition("_")
    label = "generation" if generates else LABELS.get(split)
    return prefix if label is None else f"{label} {name}".rstrip()


def format_log_line(logs: dict[str, Any], state: TrainerState, max_str_len: int | None = None) -> str:
    """Return logs as a line in columns, wrapped if necessary."""
    shown = format_logs(logs, max_str_len)
    # Each evaluation logs its duration.
    prefix = next((name.removesuffix("_runtime") for name in shown if name.endswith("_runtime")), "")
    label = {"": TRAINING, "train": "finished"}.get(prefix) or get_progress_label(prefix)
    step = f"step{NO_BREAK}{state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"
    cells = [step, f"epoch{NO_BREAK}{shown.pop('epoch', ''):{NO_BREAK}<5}", f"{label:{NO_BREAK}<10}"]
    for name, value in shown.items():
        short = name.removeprefix(f"{prefix}_")
        if short in UNITS:
            cells.append(f"{value}{NO_BREAK}{UNITS[short]}".ljust(len(UNITS[short]) + 6, NO_BREAK))
        elif short != SHOWN_BY_BARS and not name.startswith(SPEED_PREFIX):
            cells.append(f"{name if prefix == 'train' else short}{NO_BREAK}{value!s:{NO_BREAK}<9}")
    width = shutil.get_terminal_size((DEFAULT_COLUMNS, 0)).columns
    lines = textwrap.wrap("  ".join(cells), width, subsequent_indent=" " * (len(step) + 2))
    return "\n".join(line.replace(NO_BREAK, " ").rstrip() for line in lines)


class ProgressBar(tqdm):
    """Progress bar of at least 20 characters, which omits numbers on a narrow terminal, the loss last."""

    @property
    def format_dict(self) -> Any:
        shown: Any = super().format_dict
        # A notebook has a width in percent.
        while isinstance(shown["ncols"], int) and shown["total"] and self._is_bar_too_short(shown):
            first, separator, _ = (shown["postfix"] or "").rpartition(", ")
            if not separator and shown["bar_format"] is None:
                shown["bar_format"] = SHORT_BAR
            elif shown["postfix"]:
                shown["postfix"] = first
            else:
                break
        return shown

    def _is_bar_too_short(self, shown: dict[str, Any]) -> bool:
        text_format = (shown["bar_format"] or DEFAULT_BAR).replace("{bar}", "")
        text = self.format_meter(**{**shown, "ncols": None, "bar_format": text_format})
        return shown["ncols"] - len(text) < MIN_BAR_COLUMNS


def write_on_terminal(args: Any, state: TrainerState, text: str) -> None:
    """Write a line above the bars, in the first process, if stdout is a terminal and bars are not disabled."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    if state.is_world_process_zero and is_terminal and not getattr(args, "disable_tqdm", False):
        tqdm.write(text)


def show_loaded_checkpoint(args: Any, state: TrainerState) -> None:
    score = f"{args.metric_for_best_model} {format_logs({'score': state.best_metric})['score']}"
    write_on_terminal(args, state, f"The best checkpoint was loaded: {state.best_model_checkpoint} ({score}).")


def should_show_bars(args: Any) -> bool:
    """Return whether to draw bars: on a terminal, or for `disable_tqdm=False`."""
    # Libraries may pass other arguments to callbacks.
    return getattr(args, "_asked_for_bars", False) or (sys.stderr is not None and sys.stderr.isatty())


class ProgressCallback(TrainerCallback):
    """Progress bars (tqdm) over optimizer steps and evaluations, with the logs above.

    Logs are lines in columns on a terminal, else printed in transformers' format, for programs that parse them. If
    stderr is not a terminal, bars require `disable_tqdm=False`.

    Parameters:
        max_str_len: maximum length of a logged string that is shown.
    """

    def __init__(self, max_str_len: int = 100):
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self.prediction_label = LABELS["eval"]
        self.max_str_len = max_str_len
        self.current_step = 0
        self._label = TRAINING

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.current_step = 0
        self._close_bars()
        if state.is_world_process_zero:
            self._label = TRAINING
            self.training_bar = self._create_progress_bar(args, state.max_steps, self._label)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self._label_training_bar(SAVING if control.should_save and not control.should_evaluate else TRAINING)
            self.training_bar.update(state.global_step - self.current_step)
            self.current_step = state.global_step

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_save and not control.should_evaluate:
            self._label_training_bar(SAVING)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._label_training_bar(TRAINING)

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not has_length(eval_dataloader):
            return
        if self.prediction_bar is None:
            leave = self.training_bar is None
            self._label_training_bar(TRAINING)
            self.prediction_bar = self._create_progress_bar(
                args, len(eval_dataloader), self.prediction_label, leave=leave
            )
        self.prediction_bar.update(1)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_prediction_bar()
        if control.should_save:
            self._label_training_bar(SAVING)

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # type: ignore[override]
        self._close_prediction_bar()

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if self.training_bar is not None and logs is not None:
            postfix = {name: logs[key] for key, name in POSTFIX_NAMES.items() if key in logs}
            if REMAINING_SECONDS_KEY in logs:
                postfix["left"] = tqdm.format_interval(logs[REMAINING_SECONDS_KEY])
            if postfix:
                self.training_bar.set_postfix(format_logs(postfix), refresh=False)
            if sys.stdout is not None and sys.stdout.isatty():
                self.training_bar.write(format_log_line(logs, state, self.max_str_len))
            else:
                self.training_bar.write(str(format_logs(logs, self.max_str_len)))

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_bars()

    def on_training_failed(self, args: Any, state: TrainerState, error: BaseException) -> None:
        self._close_bars()

    def _create_progress_bar(self, args: Any, total: int, label: str, **keywords: Any) -> Any:
        if not should_show_bars(args):
            keywords["disable"] = True
        return ProgressBar(total=total, desc=label, dynamic_ncols=True, **keywords)

    def _label_training_bar(self, label: str) -> None:
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
    for callback in callbacks:
        if isinstance(callback, ProgressCallback):
            callback.prediction_label = label


class PrinterCallback(TrainerCallback):
    """Callback that prints the logs as lines, used if progress bars are disabled."""

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if logs is None:
            return
        # train() returns this dict as its metrics, without total_flos.
        logs.pop("total_flos", None)
        if state.is_local_process_zero:
            print(format_logs(logs))


def has_log_display(callbacks: Iterable[Any]) -> bool:
    """Return whether a callback shows logs on the console, which a script can remove."""
    return any(isinstance(callback, ProgressCallback | PrinterCallback) for callback in callbacks)


def is_in_notebook() -> bool:
    """Return whether a notebook shows HTML: a Jupyter kernel, or Colab."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def default_progress_callback() -> type[Any]:
    """Return the default callback: in a notebook, transformers' table if it is installed."""
    if is_in_notebook():
        with suppress(ImportError):
            from transformers.utils.notebook import NotebookProgressCallback

            return NotebookProgressCallback
    return ProgressCallback
