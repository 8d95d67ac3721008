"""Weights & Biases tracker, with Lightning's WandbLogger on wandb's run."""

from __future__ import annotations

import logging
import numbers
import os
import tempfile
from enum import Enum
from pathlib import Path
from typing import Any

from littrainer.runtime.lazy_isinstance import is_a
from littrainer.tracking.base import (
    SUMMARY_VALUES,
    TrackerCallback,
    collect_hyperparameters,
    drop_summary_values,
    get_model_config,
    rename_for_trackers,
    write_final_model,
)

logger = logging.getLogger(__name__)

DEFAULT_PROJECT = "huggingface"
STEP_METRIC = "train/global_step"
BADGE_PICTURE = "https://raw.githubusercontent.com/wandb/assets/main/wandb-github-badge-28.svg"
PARAMETER_COUNT = "model/num_parameters"
ARCHITECTURE_NAME = "model_architecture.txt"
WATCH_MODES = ("all", "parameters", "gradients")
# Histograms of wandb.watch are slow.
MIN_STEPS_BETWEEN_HISTOGRAMS = 100


class WandbLogModel(str, Enum):
    """Values of the environment variable WANDB_LOG_MODEL: which models are uploaded."""

    CHECKPOINT = "checkpoint"
    END = "end"
    FALSE = "false"

    @property
    def is_enabled(self) -> bool:
        return self is not WandbLogModel.FALSE

    @classmethod
    def _missing_(cls, value: object) -> WandbLogModel:
        choices = ", ".join(member.value for member in cls)
        logger.warning("WANDB_LOG_MODEL=%s is none of %s; no model is uploaded.", value, choices)
        return cls.FALSE


class WandbCallback(TrackerCallback):
    """Callback for Weights & Biases; `start_run` lists the environment variables.

    An existing run (`wandb.init`) is used. The run stays open after training, so that the script can log more, until
    `wandb.finish()` or the end of the process.
    """

    service = "wandb"
    reports_predictions = True
    shares_run = True
    step_metric = STEP_METRIC

    def __init__(self) -> None:
        super().__init__()
        import wandb

        self._wandb: Any = wandb
        self._log_model = WandbLogModel(os.environ.get("WANDB_LOG_MODEL", "false"))
        self.uploads_checkpoints = self._log_model is WandbLogModel.CHECKPOINT

    def begin_training(self, args: Any, state: Any) -> None:
        super().begin_training(args, state)
        if state.is_hyper_param_search:
            self.end_trial()
            args.run_name = None

    def end_trial(self) -> None:
        """Finish the run, unless a sweep's agent has started it for this trial."""
        if not getattr(self._wandb.run, "sweep_id", None):
            self._wandb.finish()

    def end_failed_run(self, args: Any, state: Any, error: BaseException) -> None:
        """Finish a trial's run, as failed unless it was pruned; other runs stay open for the script."""
        if self._is_trial and self._wandb.run is not None:
            self._wandb.finish(exit_code=int(not is_a(error, "pruned trial")))
            self._initialized = False

    def start_run(self, args: Any, state: Any, model: Any) -> None:
        """Start a run, unless wandb has a run, and write arguments and the model's configuration into its config.

        Environment variables: WANDB_PROJECT names the project (default: `huggingface`); WANDB_LOG_MODEL uploads the
        model at the `end` or each `checkpoint`; WANDB_WATCH draws histograms of `gradients`, `parameters` or `all`.
        wandb itself reads WANDB_MODE, WANDB_ENTITY, WANDB_DIR and others.
        """
        if self._wandb.run is None:
            self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT), **self._get_name_keywords(args, state)
            )
        self._wandb.config.update(collect_hyperparameters(args, model), allow_val_change=True)
        self._wandb.define_metric(STEP_METRIC)
        self._wandb.define_metric("*", step_metric=STEP_METRIC, step_sync=True)
        watch_mode = os.environ.get("WANDB_WATCH", "false")
        if watch_mode in WATCH_MODES:
            interval = max(MIN_STEPS_BETWEEN_HISTOGRAMS, state.logging_steps)
            self._wandb.watch(model, log=watch_mode, log_freq=interval)
        if hasattr(model, "num_parameters"):
            self._wandb.config.update({PARAMETER_COUNT: model.num_parameters()}, allow_val_change=True)
        if self._log_model.is_enabled:
            self._upload_initial_model(args, model)

    def _get_name_keywords(self, args: Any, state: Any) -> dict[str, str]:
        name = self.run_name(args, state)
        if name is None:
            return {}
        return {"name": name, "group": args.output_dir} if state.is_hyper_param_search else {"name": name}

    def card_badge(self) -> str | None:
        """Return a link to the run, if WANDB_LOG_MODEL uploads models and the run is online."""
        url = getattr(self._wandb.run, "url", None)
        return f"[![Weights & Biases]({BADGE_PICTURE})]({url})" if self._log_model.is_enabled and url else None

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        """Write values as a row of the history, and `SUMMARY_VALUES` into the summary."""
        run = self._run_logger().experiment
        for name in SUMMARY_VALUES:
            if name in logs:
                run.summary[name] = logs[name]
        self._run_logger().log_metrics({**drop_summary_values(logs), STEP_METRIC: state.global_step})

    def write_prediction_metrics(self, metrics: dict[str, Any], args: Any, state: Any) -> None:
        self._run_logger().log_metrics(rename_for_trackers(metrics))

    def _run_logger(self) -> Any:
        from lightning.pytorch.loggers import WandbLogger

        run = self._wandb.run
        if run is None:
            raise RuntimeError("wandb has no run; it was finished, and no wandb.init() followed")
        # A script may have started another run.
        if self.lightning_logger is None or self.lightning_logger.experiment is not run:
            self.lightning_logger = WandbLogger(experiment=run)
        return self.lightning_logger

    def find_lightning_logger(self) -> Any:
        return self._run_logger() if self._initialized and self._wandb.run else None

    def write_checkpoint(self, folder: Path, args: Any, state: Any) -> None:
        metadata = {**self._get_summary_numbers(), PARAMETER_COUNT: self._wandb.config.get(PARAMETER_COUNT)}
        aliases = [f"epoch_{round(state.epoch or 0, 2)}", f"checkpoint_global_step_{state.global_step}"]
        self._upload(args, folder, metadata, aliases)

    def end_run(self, args: Any, state: Any, model: Any, processing_class: Any) -> None:
        if not self._log_model.is_enabled:
            return
        metadata = self._get_summary_numbers()
        if args.load_best_model_at_end:
            metadata = {
                f"eval/{args.metric_for_best_model}": state.best_metric,
                "train/total_floss": state.total_flos,
                PARAMETER_COUNT: self._wandb.config.get(PARAMETER_COUNT),
            }
        with tempfile.TemporaryDirectory() as folder:
            write_final_model(folder, args, model, processing_class)
            self._upload_model(args, folder, model, {**metadata, "final_model": True}, "final_model")

    def _upload_initial_model(self, args: Any, model: Any) -> None:
        metadata = {
            "model_config": get_model_config(model) or None,
            "num_parameters": self._wandb.config.get(PARAMETER_COUNT),
            "initial_model": True,
        }
        with tempfile.TemporaryDirectory() as folder:
            self._upload_model(args, folder, model, metadata, "base_model")

    def _upload_model(self, args: Any, folder: str, model: Any, metadata: dict[str, Any], alias: str) -> None:
        Path(folder, ARCHITECTURE_NAME).write_text(f"{model}\n", encoding="utf-8")
        # With policy "mutable" wandb copies the files: the folder is deleted before the upload ends.
        self._upload(args, folder, metadata, [alias], policy="mutable")

    def _upload(self, args: Any, folder: Any, metadata: dict[str, Any], aliases: list[str], **keywords: Any) -> None:
        artifact = self._wandb.Artifact(name=self._get_model_name(args), type="model", metadata=metadata)
        artifact.add_dir(str(folder), **keywords)
        self._wandb.run.log_artifact(artifact, aliases=aliases)

    def _get_model_name(self, args: Any) -> str:
        run = self._wandb.run
        is_unnamed = args.run_name is None or args.run_name == args.output_dir
        return f"model-{run.id if is_unnamed else run.name}"

    def _get_summary_numbers(self) -> dict[str, Any]:
        summary = dict(self._wandb.run.summary).items()
        return {name: value for name, value in summary if isinstance(value, numbers.Number) and name[:1] != "_"}
