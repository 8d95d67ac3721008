"""One of several processes that evaluate together: `python -m tests.distributed.evaluating_process FOLDER`.

Each writes what is compared with one that evaluates alone to `FOLDER/RANK.pickle`.
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

from littrainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, StreamingMetrics, Trainer
from littrainer.data.stream_end import UnequalData
from littrainer.distributed.failures import FailedElsewhere
from tests.distributed.checks import run_checks
from tests.scenarios.collators import pad_tokens, pad_translations
from tests.scenarios.data import Rows, token_rows, translation_rows, vector_rows
from tests.scenarios.models import CLASSES, VectorClassifier, tiny_bert_classifier, tiny_t5
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

RANK = int(os.environ.get("RANK", "0"))
BATCH_SIZE = 3
# Tokens that are generated for a sample.
SHORT, LONG = 4, 7


class RowCounter(Metric):
    """A metric of the script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        self.rows += len(labels)

    def compute(self) -> Any:
        return self.rows


def streaming_metrics(folder: Path, rank: int, size: int) -> Any:
    """Metrics that are updated batch by batch, over rows of which the last batch has one or several."""
    metrics = {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "auroc": StreamingMetrics(MulticlassAUROC(CLASSES), inputs="class_scores"),
        "rows": RowCounter(),
    }
    torch.manual_seed(0)
    trainer = quiet_trainer(folder, given={"compute_metrics": metrics})
    found = []
    for rows in (11, 7):
        loader = trainer.get_eval_dataloader(Rows(vector_rows(rows, seed=1)))
        output = trainer.evaluation_loop(loader, "Evaluation")
        kept = output.predictions is not None or output.label_ids is not None
        measured: Any = output.metrics
        found.append({"kept": kept, **{name: measured[f"eval_{name}"] for name in metrics}})
    return found


def objects(folder: Path, rank: int, size: int) -> Any:
    """Labels that are a list with one object for each sample, kept batch by batch."""

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
        given={"data_collator": collate},
        eval_do_concat_batches=False,
        eval_use_gather_object=True,
        remove_unused_columns=False,
    )
    output = trainer.evaluation_loop(trainer.get_test_dataloader(Rows(vector_rows(8))), "Prediction")
    return [[label["boxes"].tolist() for label in batch] for batch in output.label_ids]


def generated(folder: Path, rank: int, size: int) -> Any:
    """Answers of a sharded model for whose samples the processes take differently many steps."""
    torch.manual_seed(0)
    sharding: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}} if size > 1 else {}
    arguments = quiet_arguments(folder, Seq2SeqTrainingArguments, predict_with_generate=True, **sharding)
    trainer = Seq2SeqTrainer(tiny_t5(), arguments, data_collator=pad_translations)
    return trainer.predict(
        Rows(translation_rows(6, seed=1)), max_length=SHORT if rank == 0 and size > 1 else LONG
    ).predictions


def answered(folder: Path, rank: int, size: int) -> Any:
    """Answers to samples of which the last batch has fewer than there are processes, with their labels."""
    torch.manual_seed(0)
    arguments = quiet_arguments(folder, Seq2SeqTrainingArguments, predict_with_generate=True)
    trainer = Seq2SeqTrainer(tiny_t5(), arguments, data_collator=pad_translations)
    found = trainer.predict(Rows(translation_rows(2 * BATCH_SIZE + 1, seed=1)), max_length=LONG)
    return found.predictions, found.label_ids


def by_tokens(folder: Path, rank: int, size: int) -> Any:
    """Predictions of batches of different sizes, the last of which have one sample to share."""
    torch.manual_seed(0)
    given = {"data_collator": pad_tokens}
    trainer = quiet_trainer(folder, tiny_bert_classifier(), given=given, max_tokens_per_batch=30)
    found = [trainer.predict(Rows(token_rows(rows, seed=1))) for rows in (23, 21)]
    return [(one.predictions, one.label_ids) for one in found]


def a_metric_function_that_fails_in_one_process_ends_the_others_too(folder: Path) -> None:
    def fails_in_one(prediction: Any) -> dict[str, float]:
        if RANK == 1:
            raise ZeroDivisionError("no rows of that kind")
        return {}

    words = "no rows of that kind" if RANK else "process 1 with ZeroDivisionError: no rows of that kind"
    with pytest.raises(ZeroDivisionError if RANK else FailedElsewhere, match=words):
        quiet_trainer(folder, given={"compute_metrics": fails_in_one}).evaluate()


def loaders_that_give_one_process_more_batches_are_refused_in_all(folder: Path) -> None:
    class OwnLoader(Trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return torch.utils.data.DataLoader(Rows(vector_rows(3 + RANK)), batch_size=1)

    with pytest.raises(UnequalData, match="rank 0 has 3 batches, rank 1 has 4 batches"):
        quiet_trainer(folder, kind=OwnLoader).evaluate()


def processes_that_evaluate_different_things_are_refused_and_get_no_wrong_number(folder: Path) -> None:
    # There are as many batches in both.
    trainer = quiet_trainer(folder)
    fewer, more = (Rows(vector_rows(rows)) for rows in (2, 5))
    words = (
        "^The processes do not evaluate the same: rank 0 has prediction with(.|\\n)*rank 1 has evaluation with metric"
    )
    with pytest.raises(UnequalData, match=words):
        (trainer.evaluate if RANK else trainer.predict)(fewer)
    with pytest.raises(UnequalData, match="rank 0 has 2, rank 1 has 5 samples"):
        trainer.evaluate(more if RANK else fewer)


def metrics_are_those_of_the_first_process_which_writes_them(folder: Path) -> None:
    trainer = quiet_trainer(folder / f"of-{RANK}", given={"compute_metrics": lambda prediction: {"rank": RANK}})
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_state()
    files = sorted(path.name for path in (folder / f"of-{RANK}").rglob("*.json"))
    assert metrics["eval_rank"] == trainer.state.log_history[-1]["eval_rank"] == 0
    written = ["all_results.json", "eval_results.json", "littrainer_run.json", "trainer_state.json"]
    assert files == ([] if RANK else written)


COMPARED = (streaming_metrics, objects, generated, answered, by_tokens)
CHECKS = (
    a_metric_function_that_fails_in_one_process_ends_the_others_too,
    loaders_that_give_one_process_more_batches_are_refused_in_all,
    processes_that_evaluate_different_things_are_refused_and_get_no_wrong_number,
    metrics_are_those_of_the_first_process_which_writes_them,
)


def find(folder: Path, rank: int, size: int) -> None:
    found = {check.__name__: check(folder, rank, size) for check in COMPARED}
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    find(Path(sys.argv[1]), rank=RANK, size=int(os.environ["WORLD_SIZE"]))
    run_checks(CHECKS, Path(sys.argv[1]))
