"""What a user sees while training runs: a progress bar, or the logs as lines."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from typing import Any

from tqdm.auto import tqdm

from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.state import TrainerControl, TrainerState
from littrainer.data.loaders import has_length

# Logged value -> its name beside the training's bar.
BESIDE_THE_BAR = {"loss": "loss", "learning_rate": "lr"}


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


def in_notebook() -> bool:
    """Whether this is a notebook in which HTML can be shown: a Jupyter kernel, Colab, or marimo with IPython."""
    if "marimo" in sys.modules:
        return importlib.util.find_spec("IPython") is not None
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def default_progress_callback() -> type[Any]:
    """The callback that shows progress here: in a notebook transformers' table, if transformers is installed."""
    if in_notebook():
        with suppress(ImportError):
            from transformers.utils.notebook import NotebookProgressCallback

            return NotebookProgressCallback
    return ProgressCallback
