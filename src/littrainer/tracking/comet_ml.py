"""Comet, by Lightning's CometLogger."""

from __future__ import annotations

import logging
import os
from typing import Any

from littrainer.tracking.base import TrackerCallback, model_config_of, shown_arguments, survives_failure
from littrainer.tracking.lightning_loggers import SharedLogger
from littrainer.tracking.metric_names import with_tracked_names
from littrainer.tracking.services import environment_says

logger = logging.getLogger(__name__)

MODES = ("get", "get_or_create", "create")


class CometCallback(TrackerCallback):
    """Reports to Comet; see `setup` for what the environment decides.

    The experiment stays open after training, for the script to log more to; the end of the process closes it.

    Raises:
        ImportError: comet_ml is not installed.
    """

    service = "comet_ml"
    reports_predictions = True

    def __init__(self) -> None:
        super().__init__()
        self._experiment: Any = None
        self._log_assets = False

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Start an experiment, or go on with one, and write arguments and the model's configuration.

        Environment variables: COMET_MODE is `get`, `create` or `get_or_create` (the default); COMET_EXPERIMENT_KEY the
        experiment to get; COMET_START_ONLINE=False keeps it in a file (in COMET_OFFLINE_DIRECTORY); COMET_PROJECT_NAME
        the project; COMET_LOG_ASSETS uploads `output_dir` when training ends.
        """
        self._initialized = True
        self._log_assets = environment_says("COMET_LOG_ASSETS")
        if not state.is_world_process_zero:
            return
        mode: Any = os.environ.get("COMET_MODE", "").lower() or None
        if mode is not None and mode not in MODES:
            raise ValueError(f"the environment variable COMET_MODE={mode} is none of {', '.join(MODES)}")
        if state.is_hyper_param_search:
            # Each trial is an experiment of its own.
            mode = "create"
        from lightning.pytorch.loggers import CometLogger

        self.lightning_logger = CometLogger(mode=mode, name=self.run_name(args, state))
        self._experiment = self.lightning_logger.experiment
        self._experiment.log_other("Created from", "littrainer")
        self.lightning_logger.log_hyperparams(_parameters(args, model))
        if model is not None:
            self._experiment.set_model_graph(str(model))
        if state.is_hyper_param_search:
            self._experiment.log_optimization(optimization_id=state.trial_name, parameters=state.trial_params)

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        """Write metrics at their step and epoch."""
        self.lightning_logger.log_metrics({**with_tracked_names(logs), "epoch": state.epoch}, step=state.global_step)

    def write_prediction_metrics(self, metrics: dict[str, Any], args: Any, state: Any) -> None:
        """Write the metrics of `predict()`."""
        self.write_logs(metrics, args, state)

    def lightning_loggers(self) -> list[Any]:
        """The CometLogger, once there is an experiment."""
        return [SharedLogger(self, lambda: self.lightning_logger)]

    @survives_failure
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Upload `output_dir`, where COMET_LOG_ASSETS asks for it, and hand over what waits in memory."""
        if not (self._initialized and state.is_world_process_zero):
            return
        if self._log_assets:
            self._experiment.log_asset_folder(
                args.output_dir, recursive=True, log_file_name=True, step=state.global_step
            )
        self.lightning_logger.finalize("success")
        if state.is_hyper_param_search:
            self.end_trial()

    def end_trial(self) -> None:
        """End the experiment."""
        self._experiment.clean()
        self._initialized = False


def _parameters(args: Any, model: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"args": shown_arguments(args)}
    config = model_config_of(model)
    if config:
        found["config"] = config
    peft_config = getattr(model, "peft_config", None)
    if peft_config is not None:
        found["peft_config"] = peft_config
    return found
