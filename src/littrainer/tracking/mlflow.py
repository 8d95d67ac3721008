"""MLflow tracker, with Lightning's MLFlowLogger on the active run."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from littrainer.arguments.report_to import SERVICES, is_enabled_in_environment
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.tracking.base import TrackerCallback, drop_non_numbers, get_model_config, mask_arguments

logger = logging.getLogger(__name__)

# Characters that MLflow does not allow in names of metrics.
NOT_IN_NAMES = re.compile(r"[^0-9A-Za-z_\-. :/]")


class MLflowCallback(TrackerCallback):
    """Callback for MLflow; `start_run` lists the environment variables.

    An active run (`mlflow.start_run`) is used and stays open. A run that this callback starts ends with the training,
    as failed if the training fails; later logs are written to it too, unless another run is active.

    Raises:
        ImportError: MLflow is not installed, or DISABLE_MLFLOW_INTEGRATION is set.
    """

    service = "mlflow"
    shares_run = True

    def __init__(self) -> None:
        reason = SERVICES["mlflow"].get_disabled_reason()
        if reason is not None:
            raise ImportError(f"MLflowCallback is not to be used: {reason}.")
        super().__init__()
        import mlflow
        from mlflow.utils import validation

        self._ml_flow: Any = mlflow
        self._MAX_PARAM_VAL_LENGTH = validation.MAX_PARAM_VAL_LENGTH
        self._auto_end_run = False
        self._pending: Any = None

    def begin_training(self, args: Any, state: Any) -> None:
        """Start a new run if the last training's run has ended, or if the script has started another run."""
        was_initialized = self._initialized
        super().begin_training(args, state)
        # All trials share a run of the script, with the first trial's parameters: MLflow does not allow changes.
        is_same = self._active_run_id() == self._logger_run_id()
        is_nested = self._is_trial and is_enabled_in_environment("MLFLOW_NESTED_RUN")
        self._initialized = was_initialized and is_same and not is_nested

    def start_run(self, args: Any, state: Any, model: Any) -> None:
        """Start a run, unless a run is active, and write arguments and the model's configuration as its parameters.

        Environment variables: MLFLOW_TRACKING_URI is the server or store; MLFLOW_EXPERIMENT_NAME is the experiment,
        created if it does not exist; MLFLOW_RUN_ID is a run to continue; MLFLOW_NESTED_RUN starts the run inside the
        active run; MLFLOW_TAGS holds tags as a JSON object; MLFLOW_FLATTEN_PARAMS flattens nested parameters;
        MLFLOW_MAX_LOG_PARAMS limits their number; HF_MLFLOW_LOG_ARTIFACTS uploads each checkpoint.
        """
        self.uploads_checkpoints = is_enabled_in_environment("HF_MLFLOW_LOG_ARTIFACTS")
        self._open_run(args, state)
        self._run_logger()
        self._log_parameters({**get_model_config(model), **mask_arguments(args)})
        tags = os.environ.get("MLFLOW_TAGS")
        if tags:
            self._ml_flow.set_tags(json.loads(tags))

    def _open_run(self, args: Any, state: Any) -> None:
        is_nested = is_enabled_in_environment("MLFLOW_NESTED_RUN")
        active = self._active_run_id()
        if active is not None and not is_nested and os.environ.get("MLFLOW_RUN_ID") in (None, "", active):
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if experiment:
            self._ml_flow.set_experiment(experiment)
        self._ml_flow.start_run(run_name=self.run_name(args, state), nested=is_nested)
        self._auto_end_run = True

    def _log_parameters(self, parameters: dict[str, Any]) -> None:
        if is_enabled_in_environment("MLFLOW_FLATTEN_PARAMS"):
            parameters = _flatten(parameters)
        too_long = [name for name, value in parameters.items() if len(str(value)) > self._MAX_PARAM_VAL_LENGTH]
        if too_long:
            logger.warning(
                "mlflow: parameters with values longer than %d characters are left out: %s. MLFLOW_FLATTEN_PARAMS=true "
                "writes those that are nested one by one.",
                self._MAX_PARAM_VAL_LENGTH,
                ", ".join(too_long),
            )
        items = [(name, value) for name, value in parameters.items() if name not in too_long]
        limit = os.environ.get("MLFLOW_MAX_LOG_PARAMS", "")
        if limit.isdigit():
            items = items[: int(limit)]
        self._ml_flow.log_params(dict(items), synchronous=False)

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        self._raise_pending_failure()
        run_id = self._run_logger().run_id
        # Write synchronously after the run's end, which waits for pending writes.
        has_ended = self._active_run_id() is None
        numbers = {NOT_IN_NAMES.sub("_", name): value for name, value in drop_non_numbers(logs, self.service).items()}
        self._pending = self._ml_flow.log_metrics(numbers, step=state.global_step, synchronous=has_ended, run_id=run_id)

    def _raise_pending_failure(self) -> None:
        # MLflow writes in the background, and raises errors in `wait` only.
        pending, futures = self._pending, getattr(self._pending, "_operation_futures", ())
        if futures and all(future.done() for future in futures):
            self._pending = None
            pending.wait()

    def _run_logger(self) -> Any:
        from lightning.pytorch.loggers import MLFlowLogger

        active, current = self._active_run_id(), self._logger_run_id()
        if active is None and current is None:
            self._ml_flow.start_run()
            self._auto_end_run = True
            active = self._active_run_id()
        run_id = active or current
        if self.lightning_logger is None or run_id != current:
            uri = self._ml_flow.get_tracking_uri()
            self.lightning_logger = MLFlowLogger(run_id=run_id, tracking_uri=uri, synchronous=False)
        return self.lightning_logger

    def _active_run_id(self) -> str | None:
        active = self._ml_flow.active_run()
        return None if active is None else active.info.run_id

    def _logger_run_id(self) -> str | None:
        return None if self.lightning_logger is None else self.lightning_logger.run_id

    def find_lightning_logger(self) -> Any:
        return self._run_logger() if self._initialized else None

    def write_checkpoint(self, folder: Path, args: Any, state: Any) -> None:
        run_logger = self._run_logger()
        run_logger.experiment.log_artifacts(run_logger.run_id, str(folder), artifact_path=folder.name)

    def end_run(self, args: Any, state: Any, model: Any, processing_class: Any) -> None:
        self._end_run("FINISHED")

    def end_failed_run(self, args: Any, state: Any, error: BaseException) -> None:
        """End the run as failed, or as killed if the training was interrupted."""
        failed = "FAILED" if isinstance(error, Exception) else "KILLED"
        self._end_run("FINISHED" if is_a(error, "pruned trial") else failed)

    def end_trial(self) -> None:
        self._end_run("FINISHED")

    def release(self) -> None:
        """End the run as failed, so that it is no longer MLflow's active run."""
        self._pending = None
        self._end_run("FAILED")

    def _end_run(self, status: str) -> None:
        if self._auto_end_run and self._ml_flow.active_run() is not None:
            self._auto_end_run = False
            self._ml_flow.end_run(status)


def _flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join names of nested dicts by dots; empty dicts stay."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        is_nested = isinstance(value, dict) and value
        flat.update(_flatten(value, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": value})
    return flat
