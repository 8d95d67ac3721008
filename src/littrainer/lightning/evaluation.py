"""Validations and tests of a module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from numbers import Number
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from littrainer.arguments.choices import SaveStrategy
from littrainer.data.loaders import PrefetchLoader, find_batch_size, get_full_dataset
from littrainer.data.sharding import get_length
from littrainer.data.stream_end import check_equal_lengths
from littrainer.distributed.collectives import gather_across_processes
from littrainer.evaluation.gathering import BatchOutputs, OutputCollector, select_main_input
from littrainer.evaluation.streaming import StreamingMetrics, find_task_facts
from littrainer.lightning.arguments import ArgumentsUnderLightning
from littrainer.lightning.preparation import get_model_inputs
from littrainer.lightning_adapter.lightning_internals import log_for_dataloader

VALIDATION, TEST = "val", "test"
# Metric functions for a Trainer may add these.
PREFIXES = ("eval_", "val_", "test_")


def add_prefix(prefix: str, name: str) -> str:
    for old_prefix in PREFIXES:
        name = name.removeprefix(old_prefix)
    return f"{prefix}_{name}"


def is_monitored(name: str, callbacks: Iterable[Any]) -> bool:
    """Return whether a callback monitors a metric, or has it in file names."""
    return any(
        getattr(callback, "monitor", None) == name or name in str(getattr(callback, "filename", None))
        for callback in callbacks
    )


def find_loader_and_affixes(loaders: Any, stage: str, index: int) -> tuple[Any, str, str]:
    """Return the loader, and prefix and suffix of its metrics."""
    if isinstance(loaders, Mapping):
        name = list(loaders)[index]
        return loaders[name], f"{stage}_{name}", ""
    if not isinstance(loaders, (list, tuple)):
        return loaders, stage, ""
    return loaders[index], stage, f"/dataloader_idx_{index}" if len(loaders) > 1 else ""


def select_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return numeric metrics; warn of others."""
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, Number)}  # type: ignore[arg-type]
    skipped = [name for name in metrics if name not in numbers]
    if skipped:
        rank_zero_warn(
            f"Metrics that are no numbers are not logged: {', '.join(skipped)}. Let compute_metrics return numbers."
        )
    return numbers


class Evaluations:
    """The state of an evaluation, with `streaming` metrics, or None."""

    def __init__(self, streaming: StreamingMetrics | None):
        self._streaming = streaming
        self._current: tuple[int, LoaderEvaluation] | None = None
        # Number and metrics of each finished loader.
        self._finished: list[tuple[int, dict[str, Any]]] = []

    def __getstate__(self) -> dict[str, Any]:
        # Copies do not continue the evaluation.
        return {"_streaming": self._streaming, "_current": None, "_finished": []}

    def begin(self, pl_trainer: Any, stage: str) -> None:
        """Reset the state, and check in a collective call that processes have equal numbers of batches."""
        self._current, self._finished = None, []
        if stage == TEST:
            counts = pl_trainer.num_test_batches
        else:
            counts = pl_trainer.num_sanity_val_batches if pl_trainer.sanity_checking else pl_trainer.num_val_batches
        for number in counts if isinstance(counts, (list, tuple)) else [counts]:
            batches = range(int(number)) if math.isfinite(number) else None
            check_equal_lengths(batches, "data of a test" if stage == TEST else "data of a validation")

    def step(self, module: Any, stage: str, batch: Any, index: int) -> dict[str, Any]:
        if self._current is None or self._current[0] != index:
            self._finish_loader()
            loaders = module.trainer.test_dataloaders if stage == TEST else module.trainer.val_dataloaders
            self._current = (
                index,
                LoaderEvaluation(module, *find_loader_and_affixes(loaders, stage, index), self._streaming),
            )
        inputs = get_model_inputs(batch)
        value, predictions, labels = module.prediction_outputs(inputs)
        self._current[1].add(inputs, value, predictions, labels)
        return {"loss": value, "predictions": predictions, "labels": labels}

    def end(self, module: Any) -> None:
        self._finish_loader()
        finished, self._finished = self._finished, []
        # `sync_dist` prevents a warning; the values are equal.
        keywords = {"prog_bar": True, "add_dataloader_idx": False, "sync_dist": module.trainer.world_size > 1}
        for position, (index, metrics) in enumerate(finished):
            with log_for_dataloader(module.trainer, index, position - len(finished)):
                module.log_dict(select_numbers(metrics), batch_size=1, **keywords)

    def _finish_loader(self) -> None:
        if self._current is not None:
            (index, loader), self._current = self._current, None
            named = {add_prefix(loader.prefix, name): value for name, value in loader.finish().items()}
            self._finished.append((index, {name + loader.suffix: value for name, value in named.items()}))


class LoaderEvaluation(OutputCollector):
    """The collected outputs of a loader's batches, in all processes."""

    def __init__(self, module: Any, loader: Any, prefix: str, suffix: str, streaming: StreamingMetrics | None):
        self.module = module
        self.prefix, self.suffix = prefix, suffix
        # A TrainerDataModule's loader counts rows without padding.
        loader = getattr(loader, "loader", loader)
        self.loader = loader if isinstance(loader, PrefetchLoader) else None
        settings, trainer = module.loss_settings, module.trainer
        self._gather: Callable[[Any], Any] = partial(gather_across_processes, copies=settings.tensor_parallel_size)
        metric_settings: Any = SimpleNamespace(
            compute_metrics=module.compute_metrics,
            preprocess_logits_for_metrics=module.preprocess_logits_for_metrics,
            is_in_train=trainer.state.fn == "fit",
            args=SimpleNamespace(save_strategy=SaveStrategy.NO),
            state=SimpleNamespace(global_step=trainer.global_step, max_steps=trainer.max_steps),
        )
        args = ArgumentsUnderLightning(module.args, trainer)
        rows = get_length(get_full_dataset(loader))
        super().__init__(metric_settings, args, rows, streaming, settings.shifts_labels, self._gather)
        if streaming is not None:
            has_scores = module.preprocess_logits_for_metrics is None and not module.has_own_prediction_outputs
            # A function, since the first forward pass may set the problem type.
            streaming.begin(
                module.device,
                lambda: find_task_facts(module.model, settings.shifts_labels, has_scores, module.generates),
            )

    def add(self, inputs: dict[str, Any], loss: Any, predictions: Any, labels: Any) -> None:
        loader, samples = self.loader, find_batch_size(inputs) or 1
        rows = loader.samples_in_last_batch() if loader is not None and loader.end_of_dataloader else None
        metric_inputs = None
        if self.module.compute_metrics is None or self.args.prediction_loss_only or predictions is None:
            predictions = labels = None
        else:
            metric_inputs = select_main_input(self.module.model, self.args.include_for_metrics, inputs)
        # The loss is repeated for a full batch, which `first_rows` cuts.
        full = None if loader is None else loader.batch_size
        loss = None if loss is None else loss.detach().reshape(1)
        outputs = self.make_outputs(
            inputs, full or samples, loss, self.get_batch_weight(inputs), predictions, labels, metric_inputs
        )
        if self.streaming is not None:
            self.update_streaming(outputs, rows)
            outputs = BatchOutputs(losses=outputs.losses)
        gathered = outputs.map(self._gather)
        self.collect(gathered if rows is None else gathered.first_rows(rows))
        self.batches_done += 1
        self.move_to_host_if_due()

    def finish(self) -> dict[str, Any]:
        """Return loss and metrics by name without prefix, the same in all processes."""
        _, metrics, mean = self.results()
        if self.streaming is not None:
            # The metrics may hold predictions on the device.
            self.streaming.reset()
        return metrics if mean is None else {**metrics, "loss": mean}
