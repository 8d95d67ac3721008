"""CodeCarbon, which measures the energy of a training and writes the emissions that it stands for."""

from __future__ import annotations

import os
from typing import Any

from littrainer.tracking.base import TrackerCallback, survives_failure


class CodeCarbonCallback(TrackerCallback):
    """Measures a training with CodeCarbon, one process of each node; emissions.csv is written into `output_dir`.

    CodeCarbon's own environment variables and .codecarbon.config hold. `tracker` may be set to a tracker of the
    script's own, an `OfflineEmissionsTracker` say, before the callback is given to a Trainer.

    Raises:
        ImportError: CodeCarbon is not installed.
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
        """Make the tracker, unless there is one."""
        if self.tracker is None and state.is_local_process_zero:
            os.makedirs(args.output_dir, exist_ok=True)
            self.tracker = self._codecarbon.EmissionsTracker(output_dir=args.output_dir)

    @survives_failure
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin to measure."""
        if self.tracker is not None and state.is_local_process_zero:
            self.tracker.start()
            self._measures = True

    @survives_failure
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop to measure, and write the emissions."""
        self._stop(state)

    @survives_failure
    def on_training_failed(self, args: Any, state: Any, error: BaseException) -> None:
        """Stop to measure, and write the emissions so far."""
        self._stop(state)

    def _stop(self, state: Any) -> None:
        if state.is_local_process_zero:
            self.release()

    def release(self) -> None:
        """Stop to measure, and write the emissions so far."""
        if self.tracker is not None and self._measures:
            self._measures = False
            self.tracker.stop()
