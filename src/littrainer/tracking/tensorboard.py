"""TensorBoard tracker, with Lightning's TensorBoardLogger."""

from __future__ import annotations

import datetime
import json
import os
import socket
from typing import Any

from littrainer.arguments.secrets import redact_secrets
from littrainer.tracking.base import (
    TrackerCallback,
    convert_to_number,
    mask_arguments,
    rename_for_trackers,
    warn_not_a_number,
)


class TensorBoardCallback(TrackerCallback):
    """Callback that writes logged values, arguments and the model's configuration as TensorBoard event files.

    The folder is `args.logging_dir`, else the environment variable TENSORBOARD_LOGGING_DIR, else a folder named by the
    current time in `<output_dir>/runs`.

    Parameters:
        tb_writer: a SummaryWriter; default: created when training begins.
    """

    service = "tensorboard"
    shares_run = True
    _folder_outside_search: str | None = None

    def __init__(self, tb_writer: Any = None):
        super().__init__()
        self.tb_writer = tb_writer
        folder = os.environ.get("TENSORBOARD_LOGGING_DIR")
        self.logging_dir = None if folder is None else os.path.expanduser(folder)

    def _init_summary_writer(self, args: Any) -> None:
        from lightning.pytorch.loggers import TensorBoardLogger

        folder = self.logging_dir if self._is_trial else args.logging_dir or self.logging_dir
        self.logging_dir = folder or _make_timestamped_folder(args)
        self.lightning_logger = TensorBoardLogger(self.logging_dir, name="", version="")
        self.tb_writer = self.lightning_logger.experiment

    def begin_training(self, args: Any, state: Any) -> None:
        if not self._is_trial:
            self._folder_outside_search = self.logging_dir
        if self.lightning_logger is not None and (self._is_trial or state.is_hyper_param_search):
            # An evaluation may have reopened a file.
            self.release()
        super().begin_training(args, state)
        self._initialized = False
        self.logging_dir = self._get_trial_folder(args, state) if self._is_trial else self._folder_outside_search

    def _get_trial_folder(self, args: Any, state: Any) -> str | None:
        if state.trial_name is not None:
            return os.path.join(_make_timestamped_folder(args), state.trial_name)
        if self._folder_outside_search is None:
            # TensorBoard shows the trials of a common folder as a list.
            self._folder_outside_search = args.logging_dir or _make_timestamped_folder(args)
        folder, trial = args.logging_dir or self._folder_outside_search, self.trial_name(state)
        return folder if trial is None else os.path.join(folder, trial)

    def start_run(self, args: Any, state: Any, model: Any) -> None:
        if self.tb_writer is None:
            self._init_summary_writer(args)
        self.tb_writer.add_text("args", json.dumps(mask_arguments(args), indent=2, default=str))
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            values = json.loads(config.to_json_string())
            masked = redact_secrets(values)
            text = config.to_json_string() if masked is values else json.dumps(masked, indent=2, sort_keys=True)
            self.tb_writer.add_text("model_config", text)

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        if self.tb_writer is None:
            self._init_summary_writer(args)
        for name, value in rename_for_trackers(logs).items():
            number = convert_to_number(value)
            if number is not None:
                self.tb_writer.add_scalar(name, number, state.global_step)
            elif isinstance(value, str):
                self.tb_writer.add_text(name, value, state.global_step)
            else:
                warn_not_a_number(self.service, name, type(value).__name__)
        self.tb_writer.flush()

    def end_run(self, args: Any, state: Any, model: Any, processing_class: Any) -> None:
        self.release()

    def release(self) -> None:
        writer, self.tb_writer, self.lightning_logger = self.tb_writer, None, None
        if writer is not None:
            writer.close()

    def lightning_loggers(self) -> list[Any]:
        is_user_writer = self.tb_writer is not None and self.lightning_logger is None
        return [] if is_user_writer else super().lightning_loggers()


def _make_timestamped_folder(args: Any) -> str:
    now = datetime.datetime.now().strftime("%b%d_%H-%M-%S")
    return os.path.join(args.output_dir, "runs", f"{now}_{socket.gethostname()}")
