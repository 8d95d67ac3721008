"""One of several processes that evaluate together: `python -m tests.distributed.evaluating_process RANK SIZE FOLDER`.

Each writes what it found to `FOLDER/RANK.pickle`. With a SIZE of 1 there is no process group.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
from torchmetrics.text import Perplexity

from littrainer import StreamingMetrics
from littrainer.data.loaders import LookaheadLoader
from littrainer.processes import collectives
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, vector_rows
from tests.scenarios.models import CLASSES, VectorClassifier, tiny_gpt2
from tests.scenarios.trainers import quiet_trainer

BATCH_SIZE = 3


def shared_loader(rows: list[Any], collate: Any, rank: int, size: int) -> LookaheadLoader:
    """This process's batches: every n-th one, the last ones filled up with the first rows."""
    step = BATCH_SIZE * size
    filled = [*range(len(rows)), *range(-len(rows) % step)] if size > 1 else list(range(len(rows)))
    batches = [filled[start : start + BATCH_SIZE] for start in range(0, len(filled), BATCH_SIZE)][rank::size]
    loader = LookaheadLoader(Rows(rows), batch_sampler=BatchList(batches), collate_fn=collate)
    loader.processes = size
    return loader


class BatchList(list[list[int]]):
    batch_size = BATCH_SIZE


def classification(folder: Path, rank: int, size: int) -> Any:
    """Predictions, labels, losses and inputs of rows that do not fill the last batches."""
    seen: dict[str, Any] = {}

    def remember(prediction: Any) -> dict[str, float]:
        seen.update(vars(prediction))
        return {"rows": len(prediction.label_ids)}

    class Vectors(VectorClassifier):
        main_input_name = "x"

    torch.manual_seed(0)
    trainer = quiet_trainer(
        folder, Vectors(), given={"compute_metrics": remember}, include_for_metrics=["inputs", "loss"]
    )
    rows = vector_rows(11, seed=1)
    output = trainer.evaluation_loop(shared_loader(rows, trainer.data_collator, rank, size), "Evaluation")
    seen.pop("elements")
    return {**seen, "metrics": output.metrics, "num_samples": output.num_samples}


def batch_by_batch(folder: Path, rank: int, size: int) -> Any:
    """What a metric function is handed of each batch."""
    seen: list[Any] = []

    def note(prediction: Any, compute_result: bool) -> dict[str, float]:
        seen.append((prediction.label_ids.tolist(), compute_result))
        return {}

    trainer = quiet_trainer(folder, given={"compute_metrics": note}, batch_eval_metrics=True)
    trainer.evaluation_loop(shared_loader(vector_rows(11), trainer.data_collator, rank, size), "Evaluation")
    return seen


def language_model(folder: Path, rank: int, size: int) -> Any:
    """Logits and labels of tokens whose batches differ in length, also between the processes."""
    torch.manual_seed(0)
    trainer = quiet_trainer(folder, tiny_gpt2(), given={"data_collator": pad_tokens})
    rows = sorted(language_rows(8, seed=2), key=lambda row: len(row["input_ids"]))
    output = trainer.evaluation_loop(shared_loader(rows, pad_tokens, rank, size), "Prediction")
    return output.predictions, output.label_ids


class RowCounter:
    """A metric that cannot put the states of several processes together."""

    def reset(self) -> None:
        self.rows = 0

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        self.rows += len(labels)

    def compute(self) -> int:
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
        loader = shared_loader(vector_rows(rows, seed=1), trainer.data_collator, rank, size)
        output = trainer.evaluation_loop(loader, "Evaluation")
        kept = output.predictions is not None or output.label_ids is not None
        measured: Any = output.metrics
        found.append({"kept": kept, **{name: measured[f"eval_{name}"] for name in metrics}})
    return found


def streaming_perplexity(folder: Path, rank: int, size: int) -> Any:
    """The perplexity of a language model over batches that differ in length, also between the processes."""
    metrics = {"perplexity": StreamingMetrics(Perplexity(), inputs="language_model_scores")}
    torch.manual_seed(0)
    trainer = quiet_trainer(folder, tiny_gpt2(), given={"data_collator": pad_tokens, "compute_metrics": metrics})
    rows = sorted(language_rows(8, seed=2), key=lambda row: len(row["input_ids"]))
    output = trainer.evaluation_loop(shared_loader(rows, pad_tokens, rank, size), "Evaluation")
    return (output.metrics or {})["eval_perplexity"]


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
    output = trainer.evaluation_loop(shared_loader(vector_rows(8), collate, rank, size), "Prediction")
    return [[label["boxes"].tolist() for label in batch] for batch in output.label_ids]


def pieces(folder: Path, rank: int, size: int) -> Any:
    """Gathering and padding by themselves, of values that differ between the processes."""
    mine = torch.full((2, 2 + rank, 2), rank)
    return {
        "padded": collectives.padded_to_longest({"a": (mine, torch.tensor(rank))}, dim=1, fill=-100),
        "padded at the start": collectives.padded_to_longest(torch.full((1, 1 + rank), 7), 1, 0, at_start=True),
        "numbers": collectives.gathered({"loss": torch.tensor(float(rank))}),
        "unequal rows": collectives.gathered(torch.full((1 + rank, 2), rank)),
        "objects": collectives.gathered_objects(("text", [rank], {"rows": torch.full((1, 1 + rank), rank)})),
    }


CHECKS = (classification, batch_by_batch, language_model, streaming_metrics, streaming_perplexity, objects, pieces)


def main(rank: int, size: int, folder: Path) -> None:
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    found = {check.__name__: check(folder, rank, size) for check in CHECKS}
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
