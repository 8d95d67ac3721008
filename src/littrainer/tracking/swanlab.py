"""SwanLab, in the cloud or kept in a folder."""

from __future__ import annotations

import logging
import os
from typing import Any

from littrainer.tracking.base import TrackerCallback, hyperparameters
from littrainer.tracking.metric_names import SUMMARY_VALUES, only_numbers, with_tracked_names

logger = logging.getLogger(__name__)

BADGE_PICTURE = "https://raw.githubusercontent.com/SwanHubX/assets/main/badge1.svg"


class SwanLabCallback(TrackerCallback):
    """Reports to SwanLab; see `setup` for what the environment decides.

    A run that is active (`swanlab.init`) is used. The run stays open after training, for what is logged later; SwanLab
    ends it with the process.

    Raises:
        ImportError: SwanLab is not installed.
    """

    service = "swanlab"
    reports_predictions = True
    _started_here: bool = False

    def __init__(self) -> None:
        super().__init__()
        import swanlab

        self._swanlab: Any = swanlab
        self._log_model = os.environ.get("SWANLAB_LOG_MODEL")

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Start a run, unless one is active, and write arguments and the model's configuration.

        Environment variables: SWANLAB_PROJECT is the project; SWANLAB_RUN_ID a run to go on with, as SWANLAB_RESUME
        (must, allow or never) says; SWANLAB_MODE whether the run is kept in the cloud or in a folder, and
        SWANLAB_LOG_DIR which. SwanLab itself reads SWANLAB_API_KEY, SWANLAB_API_HOST and SWANLAB_WEB_HOST.
        SWANLAB_LOG_MODEL has no effect, since SwanLab keeps no models.
        """
        self._initialized = True
        if not state.is_world_process_zero:
            return
        if self._log_model is not None:
            logger.warning("swanlab: SWANLAB_LOG_MODEL has no effect, since SwanLab keeps no models.")
        if self._active_run() is None:
            self._swanlab.init(**self._settings(args, state))
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
        """End the run, if this callback started it."""
        if self._started_here and self._active_run() is not None:
            self._started_here = False
            self._swanlab.finish()

    def _active_run(self) -> Any:
        try:
            return self._swanlab.get_run()
        except RuntimeError:
            # How releases from 0.10 on say that there is none.
            return None

    def _settings(self, args: Any, state: Any) -> dict[str, Any]:
        settings: dict[str, Any] = {"project": os.environ.get("SWANLAB_PROJECT")}
        name = self.run_name(args, state)
        if name is not None:
            settings["experiment_name"] = name
        if "SWANLAB_RUN_ID" in os.environ:
            settings["id"] = os.environ["SWANLAB_RUN_ID"]
        resume = os.environ.get("SWANLAB_RESUME") or ("allow" if args.resume_from_checkpoint else None)
        if resume is not None:
            settings["resume"] = resume
        return settings

    def card_badge(self) -> str | None:
        """A link to the run in the cloud, where SWANLAB_LOG_MODEL is set."""
        run = self._active_run() if self._log_model is not None else None
        url = getattr(getattr(getattr(run, "public", None), "cloud", None), "experiment_url", None)
        return f"[![SwanLab]({BADGE_PICTURE})]({url})" if url else None

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        """Write numbers as curves, and the results of the whole training as single values."""
        found = only_numbers(logs, self.service)
        singles = {f"single_value/{name}": value for name, value in found.items() if name in SUMMARY_VALUES}
        curves = with_tracked_names({name: value for name, value in found.items() if name not in SUMMARY_VALUES})
        self._swanlab.log({**singles, **curves, "train/global_step": state.global_step}, step=state.global_step)

    def write_prediction_metrics(self, metrics: dict[str, Any], args: Any, state: Any) -> None:
        """Write the metrics of `predict()`."""
        self._swanlab.log(with_tracked_names(only_numbers(metrics, self.service)))
