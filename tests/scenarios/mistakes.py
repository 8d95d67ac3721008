"""Mistakes that people make with a Trainer, each a function that ends in the error they get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from littrainer import (
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier
from tests.scenarios.trainers import QUIET_RUN

Mistake = Callable[[Path], object]
EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
OTHER_DEVICE = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
LOST_WORKER = "DataLoader worker (pid 4242) is killed by signal: Killed."


def arguments(folder: Path, kind: Any = TrainingArguments, **changes: Any) -> Any:
    return kind(str(folder), **{**QUIET_RUN, "max_steps": 2, **changes})


def trainer(folder: Path, model: Any = None, data: Any = None, trainer_kwargs: Any = None, **changes: Any) -> Trainer:
    """A Trainer with what a mistake is about in the place of what would be right.

    Parameters:
        trainer_kwargs: further keywords of the Trainer.
        changes: arguments.
    """
    keywords: dict[str, Any] = {"eval_dataset": Rows(vector_rows(4)), **(trainer_kwargs or {})}
    return Trainer(
        model=VectorClassifier() if model is None else model,
        args=arguments(folder, **changes),
        train_dataset=Rows(vector_rows(8)) if data is None else data,
        **keywords,
    )


def sentences(length: int = 4, largest: int = 10, label: int = 1) -> list[dict[str, Any]]:
    return [{"input_ids": [5, *[largest] * (length - 1)], "labels": label}] * 8


def resume_from_a_model(folder: Path) -> None:
    instance = trainer(folder)
    instance.save_model(str(folder / "model"))
    instance.train(resume_from_checkpoint=str(folder / "model"))


# Name -> the mistake in a folder; those that take several statements are functions below.
MISTAKES: dict[str, Mistake] = {
    # Before training
    "argument_with_a_slip_of_the_pen": lambda folder: arguments(folder, learning_rat=1e-4),
    "learning_rate_as_text": lambda folder: arguments(folder, learning_rate="5e-5"),
    "unknown_interval": lambda folder: arguments(folder, eval_strategy="epochs"),
    "evaluations_without_a_dataset": lambda folder: trainer(
        folder, trainer_kwargs={"eval_dataset": None}, eval_strategy="epoch"
    ),
    "best_model_without_evaluations_that_fit": lambda folder: arguments(
        folder, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="steps"
    ),
    "bfloat16_without_a_gpu": lambda folder: TrainingArguments(str(folder), bf16=True),
    "optimizer_that_is_not_installed": lambda folder: trainer(folder, optim="adamw_8bit").train(),
    "unknown_tracker": lambda folder: trainer(folder, report_to="wandbb"),
    "name_for_a_model": lambda folder: trainer(folder, model="bert-base-uncased"),
    # Data
    "texts_for_samples": lambda folder: trainer(folder, data=["a text"] * 8).train(),
    "splits_for_a_dataset": lambda folder: trainer(
        folder, data={"train": vector_rows(8), "test": vector_rows(8)}
    ).train(),
    "path_for_a_dataset": lambda folder: trainer(folder, data="data.csv").train(),
    "untokenized_texts": lambda folder: trainer(
        folder, tiny_bert_classifier(), [{"text": "a text", "label": 1}] * 8
    ).train(),
    "no_column_that_the_model_takes": lambda folder: trainer(folder, data=[{"text": "a text"}] * 8).train(),
    "column_by_another_name": lambda folder: trainer(
        folder, data=[{"features": row["x"], "labels": row["labels"]} for row in vector_rows(8)]
    ).train(),
    "labels_as_texts": lambda folder: trainer(folder, data=[{"x": [0.0] * 6, "label": "good"}] * 8).train(),
    "empty_dataset": lambda folder: trainer(folder, data=[]).train(),
    "stream_without_max_steps": lambda folder: trainer(folder, data=Stream(vector_rows(8)), max_steps=-1),
    "batch_as_a_list": lambda folder: trainer(folder, trainer_kwargs={"data_collator": list}).train(),
    "class_for_a_collator": lambda folder: trainer(folder, trainer_kwargs={"data_collator": DataCollatorWithPadding}),
    # Model
    "data_without_labels": lambda folder: trainer(folder, data=[{"x": row["x"]} for row in vector_rows(8)]).train(),
    "labels_out_of_range": lambda folder: trainer(folder, tiny_bert_classifier(), sentences(label=5)).train(),
    "token_ids_out_of_range": lambda folder: trainer(folder, tiny_bert_classifier(), sentences(largest=60)).train(),
    "samples_that_are_too_long": lambda folder: trainer(
        folder, tiny_bert_classifier(max_position_embeddings=16), sentences(20)
    ).train(),
    "all_parameters_frozen": lambda folder: trainer(folder, VectorClassifier().requires_grad_(False)).train(),
    "assertion_on_a_gpu": lambda folder: trainer(
        folder, Failing(RuntimeError("CUDA error: device-side assert triggered"))
    ).train(),
    "samples_of_unequal_length": lambda folder: trainer(
        folder, tiny_bert_classifier(), [{"input_ids": [5] * (2 + number), "labels": 1} for number in range(8)]
    ).train(),
    "labels_of_floats": lambda folder: trainer(
        folder, tiny_bert_classifier(), [{**row, "labels": 1.0} for row in sentences()]
    ).train(),
    "column_that_forward_does_not_take": lambda folder: trainer(
        folder, data=[{**row, "text_id": 1} for row in vector_rows(8)], remove_unused_columns=False
    ).train(),
    "memory_of_a_gpu": lambda folder: trainer(
        folder, Failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    ).train(),
    "tensor_on_another_device": lambda folder: trainer(folder, Failing(RuntimeError(OTHER_DEVICE))).train(),
    "lost_loader_process": lambda folder: trainer(
        folder, Failing(RuntimeError(LOST_WORKER)), dataloader_num_workers=2
    ).train(),
    # Evaluation
    "metric_that_no_evaluation_gives": lambda folder: trainer(
        folder,
        metric_for_best_model="f1",
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        **EVALUATED,
    ).train(),
    "metrics_without_names": lambda folder: trainer(folder, trainer_kwargs={"compute_metrics": accuracy}).evaluate(),
    "metrics_that_fail": lambda folder: trainer(folder, trainer_kwargs={"compute_metrics": f1}).evaluate(),
    "early_stopping_without_a_metric": lambda folder: trainer(
        folder, trainer_kwargs={"callbacks": [EarlyStoppingCallback()]}, **EVALUATED
    ).train(),
    # Checkpoints
    "checkpoint_that_is_not_there": lambda folder: trainer(folder).train(
        resume_from_checkpoint=str(folder / "checkpoint-500")
    ),
    "no_checkpoint_to_resume": lambda folder: trainer(folder).train(resume_from_checkpoint=True),
    "folder_that_is_no_checkpoint": resume_from_a_model,
    # Devices, processes and Lightning
    "shards_in_one_process": lambda folder: trainer(folder, fsdp="full_shard"),
    "unknown_keyword_of_lightning": lambda folder: trainer(
        folder, trainer_kwargs={"lightning": {"profilr": "simple"}}
    ).train(),
    "keyword_that_arguments_decide": lambda folder: trainer(
        folder, trainer_kwargs={"lightning": {"max_epochs": 3}}
    ).train(),
    # Search
    "search_without_model_init": lambda folder: trainer(folder).hyperparameter_search(n_trials=1),
}


def mistake(function: Mistake) -> Mistake:
    MISTAKES[function.__name__] = function
    return function


@mistake
def unknown_keyword_of_the_trainer(folder: Path) -> object:
    slip: Any = {"train_data": Rows(vector_rows(8))}
    return Trainer(model=VectorClassifier(), args=arguments(folder), **slip)


@mistake
def arguments_as_a_dict(folder: Path) -> object:
    trainer_kwargs: Any = {"output_dir": "out"}
    return Trainer(model=VectorClassifier(), args=trainer_kwargs)


@mistake
def dataset_in_third_place(folder: Path) -> object:
    third: Any = Rows(vector_rows(8))
    return Trainer(VectorClassifier(), arguments(folder), third)


@mistake
def quantized_model(folder: Path) -> object:
    model = VectorClassifier()
    model.is_quantized = True  # type: ignore[assignment]
    return trainer(folder, model)


@mistake
def unreadable_sample(folder: Path) -> object:
    class Broken(Rows):
        def __getitem__(self, index: int) -> Any:
            raise OSError("image 3 is broken")

    return trainer(folder, data=Broken(vector_rows(8))).train()


@mistake
def model_without_a_loss(folder: Path) -> object:
    class NoLoss(VectorClassifier):
        def forward(self, x: Any, labels: Any = None) -> Any:
            return {"logits": self.logits(x)}

    NoLoss.__name__ = "Model"
    return trainer(folder, NoLoss()).train()


@mistake
def loss_for_each_sample(folder: Path) -> object:
    class PerSample(VectorClassifier):
        def forward(self, x: Any, labels: Any = None) -> Any:
            return {"loss": nn.functional.cross_entropy(self.logits(x), labels, reduction="none")}

    return trainer(folder, PerSample()).train()


class Failing(VectorClassifier):
    """Fails as torch does on a GPU."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Any, labels: Any = None) -> Any:
        raise self.error


def accuracy(prediction: Any) -> Any:
    return 0.5


def f1(prediction: Any) -> Any:
    return {"f1": prediction.predictions["logits"]}


@mistake
def loss_without_outputs(folder: Path) -> object:
    class CustomLoss(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return model(**inputs)["loss"]

    CustomLoss.__name__ = "MyTrainer"
    rows = Rows(vector_rows(4))
    return CustomLoss(model=VectorClassifier(), args=arguments(folder), eval_dataset=rows).evaluate()


@mistake
def model_that_generates_nothing(folder: Path) -> object:
    args = arguments(folder, Seq2SeqTrainingArguments, predict_with_generate=True)
    return Seq2SeqTrainer(model=tiny_bert_classifier(), args=args, eval_dataset=sentences()).evaluate()


@mistake
def checkpoint_of_another_model(folder: Path) -> object:
    trainer(folder, save_strategy="steps", save_steps=2).train()
    return trainer(folder, VectorClassifier(hidden=4), max_steps=4).train(resume_from_checkpoint=True)


@mistake
def damaged_checkpoint(folder: Path) -> object:
    trainer(folder, save_strategy="steps", save_steps=2).train()
    saved = folder / "checkpoint-2"
    (saved / "optimizer.pt").write_bytes(b"")
    return trainer(folder, max_steps=4).train(resume_from_checkpoint=str(saved))


@mistake
def output_dir_that_is_a_file(folder: Path) -> object:
    (folder / "out").touch()
    return trainer(folder / "out")


@mistake
def name_of_a_metric_in_lightning(folder: Path) -> object:
    from lightning.pytorch.callbacks import EarlyStopping

    return trainer(folder, trainer_kwargs={"callbacks": [EarlyStopping("val_loss")]}, **EVALUATED).train()


@mistake
def unknown_direction(folder: Path) -> object:
    rows = Rows(vector_rows(4))
    searching = Trainer(
        model_init=lambda: VectorClassifier(), args=arguments(folder), train_dataset=rows, eval_dataset=rows
    )
    return searching.hyperparameter_search(n_trials=1, direction="min")
