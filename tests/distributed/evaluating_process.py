"""Evaluations in two processes: `python -m tests.distributed.evaluating_process FOLDER`.

Each process writes results for the comparison with a single process to `FOLDER/RANK.pickle`.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from littrainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, StreamingMetrics, Trainer, TrainerCallback
from littrainer.data.stream_end import UnequalData
from littrainer.distributed.failures import PeerFailedError
from tests.distributed.checks import run_checks
from tests.scenarios.collators import pad_tokens, pad_translations
from tests.scenarios.data import Rows, token_rows, translation_rows, vector_rows
from tests.scenarios.models import CLASSES, VectorClassifier, tiny_bert_classifier, tiny_llama, tiny_t5
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

RANK = int(os.environ.get("RANK", "0"))
BATCH_SIZE = 3
# Numbers of generated tokens.
SHORT, LONG = 4, 7


class RowCounter(Metric):
    """A custom metric."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        self.rows += len(labels)

    def compute(self) -> Any:
        return self.rows


def compute_streaming_metrics(folder: Path, rank: int, size: int) -> Any:
    """Compute streaming metrics over rows whose last batch is incomplete."""
    metrics = {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "auroc": StreamingMetrics(MulticlassAUROC(CLASSES), inputs="class_scores"),
        "rows": RowCounter(),
    }
    torch.manual_seed(0)
    trainer = quiet_trainer(folder, trainer_kwargs={"compute_metrics": metrics})
    results = []
    for rows in (11, 7):
        loader = trainer.get_eval_dataloader(Rows(vector_rows(rows, seed=1)))
        output = trainer.evaluation_loop(loader, "Evaluation")
        has_outputs = output.predictions is not None or output.label_ids is not None
        values: Any = output.metrics
        results.append({"has outputs": has_outputs, **{name: values[f"eval_{name}"] for name in metrics}})
    return results


def collect_objects(folder: Path, rank: int, size: int) -> Any:
    """Collect labels that are lists with an object for each sample, by batch."""

    def collate(samples: list[Any]) -> Any:
        return {
            "x": torch.stack([sample["x"] for sample in samples]),
            "labels": [{"boxes": torch.full((sample["labels"] + 1, 4), sample["labels"])} for sample in samples],
        }

    class Detector(VectorClassifier):
        def forward(self, x: Any, labels: Any = None) -> Any:
            logits = self.logits(x)
            return {"loss": logits.mean(), "logits": logits}

    trainer = quiet_trainer(
        folder,
        Detector(),
        trainer_kwargs={"data_collator": collate},
        eval_do_concat_batches=False,
        eval_use_gather_object=True,
        remove_unused_columns=False,
    )
    output = trainer.evaluation_loop(trainer.get_test_dataloader(Rows(vector_rows(8))), "Prediction")
    return [[label["boxes"].tolist() for label in batch] for batch in output.label_ids]


def collect_samples(folder: Path, rank: int, size: int) -> Any:
    """Collect labels with an entry for each sample, the last batches of which are short, without further arguments."""

    def collate(samples: list[Any]) -> Any:
        boxes = [torch.full((sample["labels"] + 1, 4), float(sample["labels"])) for sample in samples]
        labels = tuple({"boxes": sample_boxes} for sample_boxes in boxes)
        return {"labels": labels, "label_boxes": boxes, "x": torch.stack([sample["x"] for sample in samples])}

    class Detector(VectorClassifier):
        def forward(self, x: Any, labels: Any = None, label_boxes: Any = None) -> Any:
            logits = self.logits(x)
            return {"loss": logits.mean(), "logits": logits}

    trainer = quiet_trainer(folder, Detector(), trainer_kwargs={"data_collator": collate}, remove_unused_columns=False)
    labels, boxes = trainer.predict(Rows(vector_rows(8))).label_ids
    return [[label["boxes"].tolist() for label in labels], [sample_boxes.tolist() for sample_boxes in boxes]]


def predict_samples(folder: Path, rank: int, size: int) -> Any:
    """Predict lists with an entry for each sample, some of which look like layers in the first batch of a process."""

    class Detector(VectorClassifier):
        def forward(self, x: Any, labels: Any = None) -> Any:
            boxes = [row.expand(int(number), -1) for row, number in zip(x, labels, strict=True)]
            return {"loss": self.logits(x).mean(), "outputs": boxes}

    predicted = []
    for batch_size, numbers in ((1, [1, 3, 1, 3]), (2, [2, 2, 3, 5])):
        rows = [{**row, "labels": number} for row, number in zip(vector_rows(4), numbers, strict=True)]
        trainer = quiet_trainer(
            folder,
            Detector(),
            trainer_kwargs={"compute_metrics": None},
            per_device_eval_batch_size=batch_size if size > 1 else 4,
            ddp_timeout=60,
        )
        predicted.append([boxes.tolist() for boxes in trainer.predict(Rows(rows)).predictions])
    return predicted


def generate_with_shards(folder: Path, rank: int, size: int) -> Any:
    """Generate with a sharded model, with unequal numbers of steps in the processes."""
    torch.manual_seed(0)
    sharding: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}} if size > 1 else {}
    arguments = quiet_arguments(folder, Seq2SeqTrainingArguments, predict_with_generate=True, **sharding)
    trainer = Seq2SeqTrainer(tiny_t5(), arguments, data_collator=pad_translations)
    return trainer.predict(
        Rows(translation_rows(6, seed=1)), max_length=SHORT if rank == 0 and size > 1 else LONG
    ).predictions


def generate(folder: Path, rank: int, size: int) -> Any:
    """Generate for samples whose last batch has fewer samples than processes; return predictions and labels."""
    torch.manual_seed(0)
    arguments = quiet_arguments(folder, Seq2SeqTrainingArguments, predict_with_generate=True)
    trainer = Seq2SeqTrainer(tiny_t5(), arguments, data_collator=pad_translations)
    output = trainer.predict(Rows(translation_rows(2 * BATCH_SIZE + 1, seed=1)), max_length=LONG)
    return output.predictions, output.label_ids


def complete_prompts(folder: Path, rank: int, size: int) -> Any:
    """Complete prompts of different lengths with a decoder-only model."""
    torch.manual_seed(0)
    rows = [
        {"input_ids": [5 + number] * (2 + number) + [3, 4], "labels": [-100] * (2 + number) + [3, 4]}
        for number in range(2 * BATCH_SIZE + 1)
    ]
    arguments = quiet_arguments(folder, Seq2SeqTrainingArguments, predict_with_generate=True)
    trainer = Seq2SeqTrainer(tiny_llama(), arguments, data_collator=pad_tokens)
    return trainer.predict(Rows(rows), min_new_tokens=SHORT, max_new_tokens=SHORT).predictions


def predict_by_tokens(folder: Path, rank: int, size: int) -> Any:
    """Predict with batches of different sizes, of which the last global batches have a single sample."""
    torch.manual_seed(0)
    trainer = quiet_trainer(
        folder, tiny_bert_classifier(), trainer_kwargs={"data_collator": pad_tokens}, max_tokens_per_batch=30
    )
    outputs = [trainer.predict(Rows(token_rows(rows, seed=1))) for rows in (23, 21)]
    return [(output.predictions, output.label_ids) for output in outputs]


def an_error_of_a_metric_function_ends_all_processes(folder: Path) -> None:
    def fail_in_second_process(prediction: Any) -> dict[str, float]:
        if RANK == 1:
            raise ZeroDivisionError("no rows of that kind")
        return {}

    message = "no rows of that kind" if RANK else "process 1 with ZeroDivisionError: no rows of that kind"
    with pytest.raises(ZeroDivisionError if RANK else PeerFailedError, match=message):
        quiet_trainer(folder, trainer_kwargs={"compute_metrics": fail_in_second_process}).evaluate()


def loaders_with_unequal_numbers_of_batches_are_refused_in_all_processes(folder: Path) -> None:
    class CustomLoader(Trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return torch.utils.data.DataLoader(Rows(vector_rows(3 + RANK)), batch_size=1)

    with pytest.raises(UnequalData, match="rank 0 has 3 batches, rank 1 has 4 batches"):
        quiet_trainer(folder, kind=CustomLoader).evaluate()


def evaluating_different_data_is_refused(folder: Path) -> None:
    # Both processes have equally many batches.
    trainer = quiet_trainer(folder)
    fewer, more = (Rows(vector_rows(rows)) for rows in (2, 5))
    message = (
        "^The processes do not evaluate the same: rank 0 has prediction with(.|\\n)*rank 1 has evaluation with metric"
    )
    with pytest.raises(UnequalData, match=message):
        (trainer.evaluate if RANK else trainer.predict)(fewer)
    with pytest.raises(UnequalData, match="rank 0 has 2, rank 1 has 5 samples"):
        trainer.evaluate(more if RANK else fewer)


def the_first_process_computes_and_writes_the_metrics(folder: Path) -> None:
    trainer = quiet_trainer(
        folder / f"of-{RANK}", trainer_kwargs={"compute_metrics": lambda prediction: {"rank": RANK}}
    )
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_state()
    files = sorted(path.name for path in (folder / f"of-{RANK}").rglob("*.json"))
    assert metrics["eval_rank"] == trainer.state.log_history[-1]["eval_rank"] == 0
    expected = ["all_results.json", "eval_results.json", "littrainer_run.json", "trainer_state.json"]
    assert files == ([] if RANK else expected)


def a_stop_of_one_process_ends_with_an_evaluation_in_all(folder: Path) -> None:
    class StopInSecondProcess(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if RANK == 1 and state.global_step == 2:
                control.should_training_stop = True

    trainer = quiet_trainer(
        folder / "stopped",
        rows=64,
        trainer_kwargs={"callbacks": [StopInSecondProcess]},
        eval_at_end=True,
        save_strategy="steps",
        metric_for_best_model="loss",
    )
    trainer.train()
    (step,) = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert step == trainer.state.global_step == trainer.state.best_global_step < trainer.state.max_steps
    assert (folder / "stopped" / f"checkpoint-{step}").is_dir()


COMPARED = (
    *(compute_streaming_metrics, collect_objects, collect_samples, predict_samples),
    *(generate_with_shards, generate, complete_prompts, predict_by_tokens),
)
CHECKS = (
    an_error_of_a_metric_function_ends_all_processes,
    loaders_with_unequal_numbers_of_batches_are_refused_in_all_processes,
    evaluating_different_data_is_refused,
    the_first_process_computes_and_writes_the_metrics,
    a_stop_of_one_process_ends_with_an_evaluation_in_all,
)


def write_results(folder: Path, rank: int, size: int) -> None:
    results = {check.__name__: check(folder, rank, size) for check in COMPARED}
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_results(Path(sys.argv[1]), rank=RANK, size=int(os.environ["WORLD_SIZE"]))
    run_checks(CHECKS, Path(sys.argv[1]))
