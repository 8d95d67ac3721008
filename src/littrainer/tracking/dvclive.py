"""DVCLive, which writes into the working folder for DVC."""

from __future__ import annotations

import os
from typing import Any, Literal

from littrainer.tracking.base import TrackerCallback, shown_arguments, survives_failure
from littrainer.tracking.metric_names import warn_of_left_out
from littrainer.tracking.saved_models import write_final_model
from littrainer.tracking.services import environment_says

# By which DVCLive knows the metrics' names, to put them under train, eval and test.
FRAMEWORK = "dvclive.huggingface"


class DVCLiveCallback(TrackerCallback):
    """Reports to DVCLive.

    Parameters:
        live: a `dvclive.Live` to report to; one is made when training begins by default.
        log_model: track models as artifacts: True the last or best one when training ends, "all" the whole
            `output_dir` at each checkpoint. By default the environment variable HF_DVCLIVE_LOG_MODEL says it.

    Raises:
        ImportError: DVCLive is not installed.
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
        self._log_model = log_model if log_model is not None else _wish_of_environment()

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Make a `dvclive.Live`, unless there is one, and write the arguments.

        The environment variable HF_DVCLIVE_LOG_MODEL, true or all, is `log_model` where that is not given.
        """
        self._initialized = True
        if not state.is_world_process_zero:
            return
        if self.live is None:
            from dvclive import Live

            self.live = Live(**self._folder_of_trial(state))
            self._made_here = True
        self.live.log_params(shown_arguments(args))

    def _folder_of_trial(self, state: Any) -> dict[str, str]:
        trial = self.trial_name(state)
        return {} if trial is None else {"dir": os.path.join("dvclive", trial)}

    def end_trial(self) -> None:
        """Part from the run, if it was made here: the next trial has another one."""
        if self._made_here:
            self.release()
            self.live, self._made_here = None, False

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        """Write what DVCLive can log, as one of its steps."""
        from dvclive.plots import Metric
        from dvclive.utils import standardize_metric_name

        for name, value in logs.items():
            if Metric.could_log(value):
                self.live.log_metric(standardize_metric_name(name, FRAMEWORK), value)
            else:
                warn_of_left_out(self.service, name, value)
        self.live.next_step()

    @survives_failure
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Track the output_dir, where all checkpoints are wanted."""
        if self._log_model == "all" and self._initialized and state.is_world_process_zero:
            self.live.log_artifact(args.output_dir)

    @survives_failure
    def on_train_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        """Track the model in `output_dir/best` or `output_dir/last`, where it is wanted, and end DVCLive's run."""
        if not self._initialized or not state.is_world_process_zero:
            return
        if self._log_model is True:
            name = "best" if args.load_best_model_at_end else "last"
            folder = os.path.join(args.output_dir, name)
            os.makedirs(folder, exist_ok=True)
            write_final_model(folder, args, model, processing_class)
            self.live.log_artifact(folder, name=name, type="model", copy=True)
        self.live.end()

    def end_failed_run(self, args: Any, state: Any, error: BaseException) -> None:
        """End DVCLive's run."""
        if self._is_trial:
            self.end_trial()
        else:
            self.release()

    def release(self) -> None:
        """End DVCLive's run, where there is one."""
        if self.live is not None:
            self.live.end()


def _wish_of_environment() -> Literal["all"] | bool:
    if os.environ.get("HF_DVCLIVE_LOG_MODEL", "").lower() == "all":
        return "all"
    return environment_says("HF_DVCLIVE_LOG_MODEL")
