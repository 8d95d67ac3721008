"""The validations and tests of a module: what is kept of their batches, their metrics, and the names of these."""

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
from littrainer.evaluation.loop import BatchOutputs, CollectedOutputs, select_main_input
from littrainer.evaluation.streaming import StreamingMetrics, find_task_facts
from littrainer.lightning.arguments import ArgumentsUnderLightning
from littrainer.lightning.preparation import get_model_inputs
from littrainer.lightning_adapter.lightning_internals import log_for_dataloader

VALIDATION, TEST = "val", "test"
# What metric functions written for a Trainer may have put in front of a name.
PREFIXES = ("eval_", "val_", "test_")


def add_prefix(prefix: str, name: str) -> str:
    """A metric's name with the prefix of what it was computed on."""
    for known in PREFIXES:
        name = name.removeprefix(known)
    return f"{prefix}_{name}"


def is_monitored(name: str, callbacks: Iterable[Any]) -> bool:
    """Whether a callback decides by a logged number, as EarlyStopping, or names files by it, as ModelCheckpoint."""
    return any(
        getattr(one, "monitor", None) == name or name in str(getattr(one, "filename", None)) for one in callbacks
    )


def find_loader_and_affixes(loaders: Any, stage: str, index: int) -> tuple[Any, str, str]:
    """The loader that a step's `dataloader_idx` stands for, and what stands before and after its metrics' names.

    Parameters:
        loaders: what the hook of the data gave: a loader, several in a list, or by name in a dict.
        stage: `val` or `test`.
    """
    if isinstance(loaders, Mapping):
        name = list(loaders)[index]
        return loaders[name], f"{stage}_{name}", ""
    if not isinstance(loaders, (list, tuple)):
        return loaders, stage, ""
    # As Lightning names what was logged in the steps of several loaders.
    return loaders[index], stage, f"/dataloader_idx_{index}" if len(loaders) > 1 else ""


def select_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that can be logged, which are numbers; others are named in a warning."""
    found = {name: float(value) for name, value in metrics.items() if isinstance(value, Number)}  # type: ignore[arg-type]
    others = [name for name in metrics if name not in found]
    if others:
        rank_zero_warn(
            f"Metrics that are no numbers are not logged: {', '.join(others)}. Let compute_metrics return numbers."
        )
    return found


class Evaluations:
    """What is kept of the current evaluation.

    Parameters:
        streaming: metrics that are updated batch by batch; None if `compute_metrics` is a function or absent.
    """

    def __init__(self, streaming: StreamingMetrics | None):
        self._streaming = streaming
        self._round: tuple[int, LoaderEvaluation] | None = None
        # The place of each loader that had a batch, and its metrics.
        self._waiting: list[tuple[int, dict[str, Any]]] = []

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module does not go on with the current evaluation.
        return {"_streaming": self._streaming, "_round": None, "_waiting": []}

    def begin(self, pl_trainer: Any, stage: str) -> None:
        """No batch has been seen yet; all processes call this.

        Raises:
            UnequalData: the processes have differently many batches, and would wait for each other for ever.
        """
        self._round, self._waiting = None, []
        if stage == TEST:
            counts = pl_trainer.num_test_batches
        else:
            counts = pl_trainer.num_sanity_val_batches if pl_trainer.sanity_checking else pl_trainer.num_val_batches
        for number in counts if isinstance(counts, (list, tuple)) else [counts]:
            known = range(int(number)) if math.isfinite(number) else None
            check_equal_lengths(known, "data of a test" if stage == TEST else "data of a validation")

    def step(self, module: Any, stage: str, batch: Any, index: int) -> dict[str, Any]:
        """Take in one batch.

        Parameters:
            stage: `val` or `test`.
            index: place of the batch's loader among those of the stage.
        """
        if self._round is None or self._round[0] != index:
            self._finish_round()
            loaders = module.trainer.test_dataloaders if stage == TEST else module.trainer.val_dataloaders
            self._round = (
                index,
                LoaderEvaluation(module, *find_loader_and_affixes(loaders, stage, index), self._streaming),
            )
        inputs = get_model_inputs(batch)
        value, predictions, labels = module.prediction_outputs(inputs)
        self._round[1].add(inputs, value, predictions, labels)
        return {"loss": value, "predictions": predictions, "labels": labels}

    def end(self, module: Any) -> None:
        """The last batch has been seen: log loss and metrics."""
        self._finish_round()
        waiting, self._waiting = self._waiting, []
        # All processes have the same; Lightning would warn if it did not average them.
        keywords = {"prog_bar": True, "add_dataloader_idx": False, "sync_dist": module.trainer.world_size > 1}
        for place, (index, metrics) in enumerate(waiting):
            with log_for_dataloader(module.trainer, index, place - len(waiting)):
                module.log_dict(select_numbers(metrics), batch_size=1, **keywords)

    def _finish_round(self) -> None:
        if self._round is not None:
            (index, finished), self._round = self._round, None
            named = {add_prefix(finished.prefix, name): value for name, value in finished.finish().items()}
            self._waiting.append((index, {name + finished.suffix: value for name, value in named.items()}))


class LoaderEvaluation(CollectedOutputs):
    """What is kept of the batches of one loader, in all processes.

    Parameters:
        module: the module whose metrics are computed.
        loader: the batches' loader.
        prefix, suffix: what stands before and after the metrics' names.
        streaming: metrics that are updated batch by batch; None if `compute_metrics` is a function or absent.
    """

    def __init__(self, module: Any, loader: Any, prefix: str, suffix: str, streaming: StreamingMetrics | None):
        self.module = module
        self.prefix, self.suffix = prefix, suffix
        # That of a TrainerDataModule knows which rows of a last batch only fill it up.
        loader = getattr(loader, "loader", loader)
        self.loader = loader if isinstance(loader, PrefetchLoader) else None
        settings, trainer = module.loss_settings, module.trainer
        self._gather: Callable[[Any], Any] = partial(gather_across_processes, copies=settings.tensor_parallel_size)
        place: Any = SimpleNamespace(
            compute_metrics=module.compute_metrics,
            preprocess_logits_for_metrics=module.preprocess_logits_for_metrics,
            is_in_train=trainer.state.fn == "fit",
            # Lightning's checkpoints hold no metrics as JSON.
            args=SimpleNamespace(save_strategy=SaveStrategy.NO),
            state=SimpleNamespace(global_step=trainer.global_step, max_steps=trainer.max_steps),
        )
        args = ArgumentsUnderLightning(module.args, trainer)
        rows = get_length(get_full_dataset(loader))
        super().__init__(place, args, rows, streaming, settings.shifts_labels, self._gather)
        if streaming is not None:
            keeps_scores = module.preprocess_logits_for_metrics is None and not module.has_own_prediction_outputs
            # Asked for with the first batch, since its forward pass may set the problem type.
            streaming.begin(
                module.device,
                lambda: find_task_facts(module.model, settings.shifts_labels, keeps_scores, module.generates),
            )

    def add(self, inputs: dict[str, Any], loss: Any, predictions: Any, labels: Any) -> None:
        """Take in the outputs of a batch in this process."""
        loader, samples = self.loader, find_batch_size(inputs) or 1
        rows = loader.samples_in_last_batch() if loader is not None and loader.end_of_dataloader else None
        found = None
        if self.module.compute_metrics is None or self.args.prediction_loss_only or predictions is None:
            predictions = labels = None
        else:
            found = select_main_input(self.module.model, self.args.include_for_metrics, inputs)
        # The loss of a short last batch of a TrainerDataModule stands for the samples of a full one, which is cut off.
        full = None if loader is None else loader.batch_size
        loss = None if loss is None else loss.detach().reshape(1)
        own = self.make_outputs(
            inputs, full or samples, loss, self.get_batch_weight(inputs), predictions, labels, found
        )
        if self.streaming is not None:
            self.update_streaming(own, rows)
            own = BatchOutputs(losses=own.losses)
        everywhere = BatchOutputs(*(None if value is None else self._gather(value) for value in own))
        self.collect(everywhere if rows is None else everywhere.first_rows(rows))
        self.batches_done += 1
        self.move_to_host_if_due()

    def finish(self) -> dict[str, Any]:
        """The loss and the metrics of all batches, by their names without prefix; the same in all processes."""
        _, metrics, mean = self.results()
        if self.streaming is not None:
            # Some keep all predictions of an evaluation, on the device.
            self.streaming.reset()
        return metrics if mean is None else {**metrics, "loss": mean}
