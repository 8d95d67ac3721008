"""One of several processes that evaluate together: `python -m tests.distributed.evaluating_process FOLDER`.

Each writes what it found to `FOLDER/RANK.pickle`. One that evaluates alone has no process group.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from littrainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, StreamingMetrics, Trainer
from tests.scenarios.collators import pad_translations
from tests.scenarios.data import Rows, translation_rows, vector_rows
from tests.scenarios.models import CLASSES, VectorClassifier, tiny_t5
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

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


def failing(folder: Path, rank: int, size: int) -> Any:
    """What is raised in each process where a metric function fails in one."""

    def fails_in_one(prediction: Any) -> dict[str, float]:
        if rank == 1:
            raise ZeroDivisionError("no rows of that kind")
        return {}

    return raised_by(quiet_trainer(folder, given={"compute_metrics": fails_in_one}).evaluate)


def uneven(folder: Path, rank: int, size: int) -> Any:
    """What is raised where a loader of the script's own gives one process a batch more."""

    class OwnLoader(Trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return torch.utils.data.DataLoader(Rows(vector_rows(3 + rank)), batch_size=1)

    return raised_by(quiet_trainer(folder, kind=OwnLoader).evaluate)


def different(folder: Path, rank: int, size: int) -> Any:
    """What is raised where one process makes another call than the other, over data with as many batches."""
    trainer = quiet_trainer(folder)
    fewer, more = (Rows(vector_rows(rows)) for rows in (2, 5))
    return {
        "calls": raised_by(lambda: trainer.predict(fewer) if rank == 0 else trainer.evaluate(fewer)),
        "samples": raised_by(lambda: trainer.evaluate(fewer if rank == 0 else more)),
    }


def raised_by(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def of_the_process(folder: Path, rank: int, size: int) -> Any:
    """Metrics that a function computes otherwise in each process, and what is left of them."""
    trainer = quiet_trainer(folder / f"of-{rank}", given={"compute_metrics": lambda prediction: {"rank": rank}})
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_state()
    files = sorted(path.name for path in (folder / f"of-{rank}").rglob("*.json"))
    return {"rank": metrics["eval_rank"], "history": trainer.state.log_history[-1]["eval_rank"], "files": files}


CHECKS = (streaming_metrics, objects, generated)
TOGETHER = (failing, uneven, different, of_the_process)


def find(folder: Path, rank: int, size: int) -> None:
    checks = (*CHECKS, *(TOGETHER if size > 1 else ()))
    found = {check.__name__: check(folder, rank, size) for check in checks}
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    find(Path(sys.argv[1]), rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
