"""Azure Machine Learning, by the run that a job of it has."""

from __future__ import annotations

from typing import Any

from littrainer.tracking.base import TrackerCallback, survives_failure
from littrainer.tracking.metric_names import only_numbers


class AzureMLCallback(TrackerCallback):
    """Reports to a run of Azure Machine Learning, under the names that metrics are logged with.

    Parameters:
        azureml_run: the run; by default that of the job that this process belongs to.

    Raises:
        ImportError: azureml-core is not installed.
    """

    service = "azure_ml"

    def __init__(self, azureml_run: Any = None) -> None:
        super().__init__()
        self.azureml_run: Any = azureml_run

    @survives_failure
    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look up the job's run, unless one was given."""
        from azureml.core.run import Run

        if self.azureml_run is None and state.is_world_process_zero:
            self.azureml_run = Run.get_context()

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        """Write numbers as metrics."""
        if self.azureml_run is None:
            return
        for name, value in only_numbers(logs, self.service).items():
            self.azureml_run.log(name, value, description=name)
