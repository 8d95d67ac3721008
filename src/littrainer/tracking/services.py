"""Trackers that take a few calls each: Azure Machine Learning, CodeCarbon, Comet, DVCLive, Flyte and SwanLab."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Literal

from littrainer.arguments.report_to import environment_says, is_importable
from littrainer.tracking.base import (
    SUMMARY_VALUES,
    TrackerCallback,
    hyperparameters,
    model_config_of,
    only_numbers,
    shown_arguments,
    survives_failure,
    warn_of_left_out,
    with_tracked_names,
    without_summary,
    write_final_model,
)
from littrainer.tracking.lightning_loggers import SharedLogger

logger = logging.getLogger(__name__)


class AzureMLCallback(TrackerCallback):
    """Reports to a run of Azure Machine Learning, under the names that metrics are logged with.

    Parameters:
        azureml_run: the run; by default that of the job that this process belongs to.
    """

    service = "azure_ml"

    def __init__(self, azureml_run: Any = None) -> None:
        super().__init__()
        self.azureml_run: Any = azureml_run

    @survives_failure
    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from azureml.core.run import Run

        if self.azureml_run is None and state.is_world_process_zero:
            self.azureml_run = Run.get_context()

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        if self.azureml_run is None:
            return
        for name, value in only_numbers(logs, self.service).items():
            self.azureml_run.log(name, value, description=name)


class CodeCarbonCallback(TrackerCallback):
    """Measures a training with CodeCarbon, one process of each node; emissions.csv is written into `output_dir`.

    CodeCarbon reads its environment variables and .codecarbon.config. A script may set `tracker`, for instance to an
    `OfflineEmissionsTracker`, before it gives the callback to a Trainer.

    Raises:
        RuntimeError: torch runs on ROCm, whose devices CodeCarbon does not measure.
    """

    service = "codecarbon"
    _measures: bool = False

    def __init__(self) -> None:
        super().__init__()
        import codecarbon
        import torch

        if torch.version.hip:
            raise RuntimeError("CodeCarbonCallback: CodeCarbon does not measure AMD ROCm; take it out of report_to.")
        self._codecarbon: Any = codecarbon
        self.tracker: Any = None

    @survives_failure
    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.tracker is None and state.is_local_process_zero:
            os.makedirs(args.output_dir, exist_ok=True)
            self.tracker = self._codecarbon.EmissionsTracker(output_dir=args.output_dir)

    @survives_failure
    def on_train_begin(self, args: Any, state: Any, *event: Any, **kwargs: Any) -> None:
        if self.tracker is not None and state.is_local_process_zero:
            self.tracker.start()
            self._measures = True

    @survives_failure
    def on_train_end(self, *event: Any, **kwargs: Any) -> None:
        self.release()

    on_training_failed = on_train_end

    def release(self) -> None:
        if self.tracker is not None and self._measures:
            self._measures = False
            self.tracker.stop()


MODES = ("get", "get_or_create", "create")


class CometCallback(TrackerCallback):
    """Reports to Comet; `start_run` lists the environment variables.

    The experiment stays open after training, so that the script can log more; the end of the process closes it.
    """

    service = "comet_ml"
    reports_predictions = True

    def __init__(self) -> None:
        super().__init__()
        self._experiment: Any = None
        self._log_assets = False

    def start_run(self, args: Any, state: Any, model: Any) -> None:
        """Start an experiment, or continue one, and write arguments and the model's configuration.

        Environment variables: COMET_MODE is `get`, `create` or `get_or_create` (default); COMET_EXPERIMENT_KEY is the
        experiment to get; COMET_START_ONLINE=False keeps it in a file (in COMET_OFFLINE_DIRECTORY); COMET_PROJECT_NAME
        is the project; COMET_LOG_ASSETS uploads `output_dir` when training ends.
        """
        self._log_assets = environment_says("COMET_LOG_ASSETS")
        mode: Any = os.environ.get("COMET_MODE", "").lower() or None
        if mode is not None and mode not in MODES:
            raise ValueError(f"the environment variable COMET_MODE={mode} is none of {', '.join(MODES)}")
        if state.is_hyper_param_search:
            mode = "create"
        from lightning.pytorch.loggers import CometLogger

        self.lightning_logger = CometLogger(mode=mode, name=self.run_name(args, state))
        self._experiment = self.lightning_logger.experiment
        self._experiment.log_other("Created from", "littrainer")
        parameters = {"args": shown_arguments(args), "config": model_config_of(model) or None}
        parameters["peft_config"] = getattr(model, "peft_config", None)
        self.lightning_logger.log_hyperparams({name: value for name, value in parameters.items() if value is not None})
        if model is not None:
            self._experiment.set_model_graph(str(model))
        if state.is_hyper_param_search:
            self._experiment.log_optimization(optimization_id=state.trial_name, parameters=state.trial_params)

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        self.lightning_logger.log_metrics({**with_tracked_names(logs), "epoch": state.epoch}, step=state.global_step)

    def write_prediction_metrics(self, metrics: dict[str, Any], args: Any, state: Any) -> None:
        self.write_logs(metrics, args, state)

    def lightning_loggers(self) -> list[Any]:
        return [SharedLogger(self, lambda: self.lightning_logger)]

    def end_run(self, args: Any, state: Any, model: Any, processing_class: Any) -> None:
        if self._log_assets:
            step = state.global_step
            self._experiment.log_asset_folder(args.output_dir, recursive=True, log_file_name=True, step=step)
        self.lightning_logger.finalize("success")
        if state.is_hyper_param_search:
            self.end_trial()

    def end_trial(self) -> None:
        self._experiment.clean()
        self._initialized = False


# DVCLive puts metrics of this framework under train, eval and test.
FRAMEWORK = "dvclive.huggingface"


class DVCLiveCallback(TrackerCallback):
    """Reports to DVCLive.

    Parameters:
        live: a `dvclive.Live` to report to; by default one is made when training begins.
        log_model: track models as artifacts: with True the last or best one when training ends, with "all" the whole
            `output_dir` at each checkpoint. The default is the environment variable HF_DVCLIVE_LOG_MODEL (true or all).

    Raises:
        TypeError: `live` is something else.
    """

    service = "dvclive"
    _made_here: bool = False

    def __init__(self, live: Any = None, log_model: Literal["all"] | bool | None = None, **kwargs: Any) -> None:
        super().__init__()
        from dvclive import Live

        if live is not None and not isinstance(live, Live):
            raise TypeError(
                f"DVCLiveCallback: live has to be a dvclive.Live, got a {type(live).__name__}: pass dvclive.Live(...)."
            )
        self.live: Any = live
        if log_model is None:
            is_all = os.environ.get("HF_DVCLIVE_LOG_MODEL", "").lower() == "all"
            log_model = "all" if is_all else environment_says("HF_DVCLIVE_LOG_MODEL")
        self._log_model = log_model
        self.uploads_checkpoints = log_model == "all"

    def start_run(self, args: Any, state: Any, model: Any) -> None:
        if self.live is None:
            from dvclive import Live

            trial = self.trial_name(state)
            self.live = Live() if trial is None else Live(dir=os.path.join("dvclive", trial))
            self._made_here = True
        self.live.log_params(shown_arguments(args))

    def end_trial(self) -> None:
        if self._made_here:
            self.release()
            self.live, self._made_here = None, False

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        from dvclive.plots import Metric
        from dvclive.utils import standardize_metric_name

        for name, value in logs.items():
            if Metric.could_log(value):
                self.live.log_metric(standardize_metric_name(name, FRAMEWORK), value)
            else:
                warn_of_left_out(self.service, name, value)
        self.live.next_step()

    def write_checkpoint(self, folder: Path, args: Any, state: Any) -> None:
        self.live.log_artifact(args.output_dir)

    def end_run(self, args: Any, state: Any, model: Any, processing_class: Any) -> None:
        if self._log_model is True:
            name = "best" if args.load_best_model_at_end else "last"
            folder = os.path.join(args.output_dir, name)
            os.makedirs(folder, exist_ok=True)
            write_final_model(folder, args, model, processing_class)
            self.live.log_artifact(folder, name=name, type="model", copy=True)
        self.live.end()

    def release(self) -> None:
        if self.live is not None:
            self.live.end()


class FlyteCallback(TrackerCallback):
    """Shows a training on a Deck of the Flyte task that it runs in, and saves its checkpoints there.

    Parameters:
        save_log_history: show all logs as a table when training ends, with flytekitplugins-deck-standard and pandas.
        sync_checkpoints: save each checkpoint. After an interruption the task resumes with
            `trainer.train(resume_from_checkpoint=current_context().checkpoint.restore())`.
    """

    service = "flyte"

    def __init__(self, save_log_history: bool = True, sync_checkpoints: bool = True) -> None:
        super().__init__()
        has_decks = is_importable("flytekitplugins.deck") and is_importable("pandas")
        if save_log_history and not has_decks:
            logger.warning(
                "flyte: the log history is not shown: run `pip install flytekitplugins-deck-standard pandas`."
            )
        from flytekit import current_context

        self.cp: Any = current_context().checkpoint
        self.save_log_history = save_log_history and has_decks
        self.uploads_checkpoints = sync_checkpoints

    def write_checkpoint(self, folder: Path, args: Any, state: Any) -> None:
        self.cp.save(str(folder))

    def end_run(self, args: Any, state: Any, model: Any, processing_class: Any) -> None:
        if not self.save_log_history:
            return
        import pandas
        from flytekit import Deck
        from flytekitplugins.deck.renderer import TableRenderer

        Deck("Log History", TableRenderer().to_html(pandas.DataFrame(state.log_history)))


BADGE_PICTURE = "https://raw.githubusercontent.com/SwanHubX/assets/main/badge1.svg"


class SwanLabCallback(TrackerCallback):
    """Reports to SwanLab; `start_run` lists the environment variables.

    An active run (`swanlab.init`) is used. The run stays open after training, so that the script can log more; SwanLab
    ends it with the process.
    """

    service = "swanlab"
    reports_predictions = True
    _started_here: bool = False

    def __init__(self) -> None:
        super().__init__()
        import swanlab

        self._swanlab: Any = swanlab
        self._log_model = os.environ.get("SWANLAB_LOG_MODEL")

    def start_run(self, args: Any, state: Any, model: Any) -> None:
        """Start a run, unless one is active, and write arguments and the model's configuration.

        Environment variables: SWANLAB_PROJECT is the project; SWANLAB_RUN_ID is a run to continue, with SWANLAB_RESUME
        (must, allow or never); SWANLAB_MODE keeps the run in the cloud or in a folder, SWANLAB_LOG_DIR. SwanLab itself
        reads SWANLAB_API_KEY, SWANLAB_API_HOST and SWANLAB_WEB_HOST. SwanLab keeps no models: SWANLAB_LOG_MODEL only
        puts a link into the model card.
        """
        if self._log_model is not None:
            logger.warning("swanlab: no model is uploaded by SWANLAB_LOG_MODEL, because SwanLab keeps no models.")
        if self._active_run() is None:
            settings = {
                "experiment_name": self.run_name(args, state),
                "id": os.environ.get("SWANLAB_RUN_ID"),
                "resume": os.environ.get("SWANLAB_RESUME") or ("allow" if args.resume_from_checkpoint else None),
            }
            given = {name: value for name, value in settings.items() if value is not None}
            self._swanlab.init(project=os.environ.get("SWANLAB_PROJECT"), **given)
            self._started_here = True
        config = self._swanlab.config
        config["FRAMEWORK"] = "\N{HUGGING FACE}transformers"
        config.update(hyperparameters(args, model))
        if hasattr(model, "num_parameters"):
            config.update({"model_num_parameters": model.num_parameters()})
        if hasattr(model, "get_nb_trainable_parameters"):
            trainable, all_of_them = model.get_nb_trainable_parameters()
            config.update({"peft_model_trainable_params": trainable, "peft_model_all_param": all_of_them})

    def end_trial(self) -> None:
        if self._started_here and self._active_run() is not None:
            self._started_here = False
            self._swanlab.finish()

    def _active_run(self) -> Any:
        try:
            return self._swanlab.get_run()
        except RuntimeError:
            # Releases from 0.10 on raise it if there is none.
            return None

    def card_badge(self) -> str | None:
        """Return a link to the run in the cloud, if SWANLAB_LOG_MODEL is set."""
        run = self._active_run() if self._log_model is not None else None
        url = getattr(getattr(getattr(run, "public", None), "cloud", None), "experiment_url", None)
        return f"[![SwanLab]({BADGE_PICTURE})]({url})" if url else None

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        """Write numbers as curves, and the results of the whole training as single values."""
        found = only_numbers(logs, self.service)
        singles = {f"single_value/{name}": value for name, value in found.items() if name in SUMMARY_VALUES}
        values = {**singles, **without_summary(found), "train/global_step": state.global_step}
        self._swanlab.log(values, step=state.global_step)

    def write_prediction_metrics(self, metrics: dict[str, Any], args: Any, state: Any) -> None:
        self._swanlab.log(with_tracked_names(only_numbers(metrics, self.service)))
