"""Arguments about what a run tells, to whom and how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from littrainer.arguments.about import about
from littrainer.arguments.choices import IntervalStrategy

LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")


@dataclass
class LoggingFields:
    """Logged values, log levels, progress bars and experiment trackers."""

    logging_strategy: IntervalStrategy | str = field(
        default="steps", metadata=about("When to log: `no`, every `steps` or each `epoch`.")
    )
    logging_steps: float = field(
        default=500, metadata=about("Optimizer steps between two logs; below 1 it is a share of all steps.")
    )
    logging_first_step: bool = field(default=False, metadata=about("Log after the first optimizer step too."))
    log_on_each_node: bool = field(
        default=True, metadata=about("Let the first process of each node log, not only that of the first node.")
    )
    logging_nan_inf_filter: bool = field(
        default=True, metadata=about("Leave nan and infinite losses out of the logged mean; gradients are not touched.")
    )
    include_num_input_tokens_seen: str | bool = field(
        default="no", metadata=about("Count input tokens in the logs: `all`, `non_padding` or `no`; true means `all`.")
    )
    log_level: str = field(
        default="passive",
        metadata=about(
            "Log level of the main process; `passive` leaves the application's level.", choices=list(LOG_LEVELS)
        ),
    )
    log_level_replica: str = field(
        default="warning",
        metadata=about(
            "Log level of the other processes; `passive` leaves the application's level.", choices=list(LOG_LEVELS)
        ),
    )
    disable_tqdm: bool | None = field(
        default=None,
        metadata=about("Show no progress bars; unset shows them on a terminal if warnings are shown, false anywhere."),
    )
    report_to: list[str] | str | None = field(
        default="none", metadata=about("Experiment trackers to report to, by name; `none` reports to none.")
    )
    run_name: str | None = field(default=None, metadata=about("Name of this run in the experiment trackers."))
    project: str = field(
        default="huggingface", metadata=about("Name of the project in the experiment trackers that group runs.")
    )
    trackio_space_id: str | None = field(
        default=None, metadata=about("Hugging Face Space to which Trackio sends the run.")
    )
    trackio_bucket_id: str | None = field(
        default=None, metadata=about("Hugging Face storage bucket in which Trackio keeps the run.")
    )
    trackio_static_space_id: Literal[False] | str | None = field(
        default=None,
        metadata=about("Static Space that Trackio publishes at the end of training; false publishes none."),
    )
