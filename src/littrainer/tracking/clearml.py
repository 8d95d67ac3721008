"""ClearML, on a server or kept offline."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, ClassVar

from littrainer.arguments.report_to import TRUE_VALUES
from littrainer.arguments.secrets import holds_a_secret
from littrainer.errors.lazy_isinstance import is_a
from littrainer.tracking.base import (
    SUMMARY_VALUES,
    TrackerCallback,
    flattened,
    model_config_of,
    only_numbers,
    shown_arguments,
    split_and_name,
)

logger = logging.getLogger(__name__)

SINGLE_VALUES = (*SUMMARY_VALUES, "epoch")
# A clone of the task that a ClearML agent runs takes its values from the server if this parameter is off.
IGNORE_ARGUMENTS = "_ignore_hparams_ui_overrides_"
IGNORE_MODEL_CONFIG = "_ignore_model_config_ui_overrides_"
IGNORE_DESCRIPTION = "If true, values changed on the server have no effect when this task is run remotely"


class ClearMLCallback(TrackerCallback):
    """Reports to ClearML; `start_run` lists the environment variables.

    The current task (`clearml.Task.init`) is used and left open. A task that this callback starts is closed when the
    training ends, and gets later logs too; the next training starts another.
    """

    service = "clearml"
    log_suffix: str = ""
    """Follows the names of the second and later trainings on one task, which would overwrite those of the first."""

    # Trainings that have reported to the current task, with any callback.
    _train_run_counter: ClassVar[int] = 0
    _hparams_section = "Transformers"
    _model_config_section = "Model Configuration"

    def __init__(self) -> None:
        super().__init__()
        import clearml

        self._clearml: Any = clearml
        self._clearml_task: Any = None
        self._closes_task = False
        self._checkpoints_saved: list[Any] = []

    def begin_training(self, args: Any, state: Any) -> None:
        super().begin_training(args, state)
        self._checkpoints_saved = []
        if self._clearml_task is not None and self._clearml.Task.current_task() is None:
            self._initialized = False

    def start_run(self, args: Any, state: Any, model: Any) -> None:
        """Start a task, unless one is current, and write arguments and the model's configuration.

        Environment variables: CLEARML_PROJECT and CLEARML_TASK name the task that is started; CLEARML_LOG_MODEL uploads
        checkpoints. By default they are uploaded to such a task, and not to a task that the script started.
        """
        task_class = self._clearml.Task
        self._clearml_task = task_class.current_task() if task_class.running_locally() else None
        started_here = self._clearml_task is None
        if started_here:
            ClearMLCallback._train_run_counter = 0
            self._clearml_task = task_class.init(
                project_name=os.environ.get("CLEARML_PROJECT", "HuggingFace Transformers"),
                task_name="-".join(filter(None, (os.environ.get("CLEARML_TASK", "Trainer"), self.trial_name(state)))),
                # ClearML would take the task of the trial before, with the same name, for a failed try of this one.
                reuse_last_task_id=not state.is_hyper_param_search,
                auto_connect_frameworks={"tensorboard": False, "pytorch": False},
                output_uri=True,
            )
        self._closes_task = started_here and task_class.running_locally()
        self.uploads_checkpoints = os.environ.get("CLEARML_LOG_MODEL", str(started_here)).upper() in TRUE_VALUES
        ClearMLCallback._train_run_counter += 1
        count = ClearMLCallback._train_run_counter
        self.log_suffix = "" if count == 1 else f"_{count}"
        arguments = {name: value for name, value in shown_arguments(args).items() if not holds_a_secret(name)}
        section = self._hparams_section + self.log_suffix
        if self._server_decides(IGNORE_ARGUMENTS):
            self._clearml_task.connect(args, section)
        else:
            self._clearml_task.update_parameters(flattened(arguments, "/", f"{section}/"))
        if getattr(model, "config", None) is None:
            return
        name = self._model_config_section + self.log_suffix
        if self._server_decides(IGNORE_MODEL_CONFIG):
            model.config = model.config.from_dict(self._clearml_task.get_configuration_object_as_dict(name))
        else:
            about = f"The configuration of model number {count}."
            config = model_config_of(model)
            self._clearml_task.set_configuration_object(name=name, config_dict=config, description=about)

    def _server_decides(self, switch: str) -> bool:
        name, task = f"{self._hparams_section}{self.log_suffix}/{switch}", self._clearml_task
        if self._clearml.Task.running_locally():
            task.set_parameter(name=name, value=True, value_type=bool, description=IGNORE_DESCRIPTION)
            return False
        return not task.get_parameter(name, default=True, cast=True)

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        """Write numbers as curves of their split, and the results of the whole training as single values."""
        reports = self._clearml_task.get_logger()
        for name, value in only_numbers(logs, self.service).items():
            if name in SINGLE_VALUES:
                reports.report_single_value(name=name + self.log_suffix, value=value)
            else:
                split, series = split_and_name(name)
                title = split + self.log_suffix
                reports.report_scalar(title=title, series=series, value=value, iteration=state.global_step)

    def write_checkpoint(self, folder: Path, args: Any, state: Any) -> None:
        """Upload the checkpoint, and delete those beyond `save_total_limit` from the server."""
        model = self._clearml.OutputModel(task=self._clearml_task, name=folder.name + self.log_suffix)
        model.connect(task=self._clearml_task, name=folder.name + self.log_suffix)
        model.update_weights_package(
            weights_path=str(folder), target_filename=folder.name, iteration=state.global_step, auto_delete_file=False
        )
        self._checkpoints_saved.append(model)
        while args.save_total_limit and len(self._checkpoints_saved) > args.save_total_limit:
            oldest = self._checkpoints_saved[0]
            try:
                self._clearml.model.Model.remove(oldest, delete_weights_file=True, force=True, raise_on_errors=True)
            except Exception as error:
                logger.warning("clearml: the older checkpoint %s could not be deleted: %s.", oldest.name, error)
                break
            del self._checkpoints_saved[0]

    def end_run(self, args: Any, state: Any, model: Any, processing_class: Any) -> None:
        self.release()

    def end_failed_run(self, args: Any, state: Any, error: BaseException) -> None:
        """Mark the task as failed, or as stopped if the training was interrupted."""
        if self._closes_task and self._clearml_task is not None:
            if isinstance(error, Exception) and not is_a(error, "pruned trial"):
                self._clearml_task.mark_failed(status_reason=type(error).__name__, status_message=str(error))
            else:
                self._clearml_task.mark_stopped(force=True)
        self.release()

    def release(self) -> None:
        if self._closes_task and self._clearml_task is not None:
            self._closes_task = False
            self._clearml_task.close()
