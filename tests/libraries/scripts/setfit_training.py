"""Few-shot classifiers with setfit: an embedding model is fine-tuned, then a head is fitted on its embeddings."""

import json
import random
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from setfit import DistillationTrainer, SetFitHead, SetFitModel, Trainer, TrainingArguments
from setfit.notebook import SetFitNotebookProgressCallback
from sklearn.linear_model import LogisticRegression
from small_bert import copy_parameter_memory, sentence, write_bert
from transformers import BertModel, TrainerCallback

QUICK = {
    "batch_size": 4,
    "num_epochs": 1,
    "num_iterations": 2,
    "body_learning_rate": (1e-3, 1e-3),
    "logging_steps": 1,
    "report_to": "none",
    "seed": 5,
}


def rows(count, seed, **renamed):
    draws = random.Random(seed)
    columns = {"text": [sentence(draws) for _ in range(count)], "label": [number % 2 for number in range(count)]}
    return Dataset.from_dict({renamed.get(name, name): values for name, values in columns.items()})


def accuracy(predicted, expected):
    hits = [int(prediction) == int(other) for prediction, other in zip(predicted, expected, strict=True)]
    return {"accuracy": sum(hits) / len(hits)}


def classifier(head=None):
    body = copy_parameter_memory(SentenceTransformer(write_bert(BertModel), device="cpu"))
    return SetFitModel(model_body=body, model_head=LogisticRegression() if head is None else head)


class EventNotes(TrainerCallback):
    """Records the parameters of each event: setfit's arguments and models, and those of its inner trainer."""

    def __init__(self):
        self.notes = []

    def note(self, event, args, state, **kwargs):
        kinds = {name: type(value).__name__ for name, value in kwargs.items() if name.rpartition("_")[2] == "model"}
        self.notes.append([event, type(args).__name__, type(kwargs["st_args"]).__name__, state.global_step, kinds])

    def on_init_end(self, args, state, control, **kwargs):
        self.note("init_end", args, state, **kwargs)

    def on_train_begin(self, args, state, control, **kwargs):
        self.note("train_begin", args, state, **kwargs)

    def on_step_end(self, args, state, control, optimizer, lr_scheduler, **kwargs):
        self.notes.append(["rate", optimizer.param_groups[0]["lr"], lr_scheduler.get_last_lr()])

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.notes.append(["evaluate", *(name for name in metrics if "runtime" not in name)])

    def on_train_end(self, args, state, control, **kwargs):
        self.note("train_end", args, state, **kwargs)


def finish(trainer, name, notes=None, held_out=None, **keywords):
    trainer.train(**keywords)
    inner = trainer.st_trainer
    inner.args.output_dir = name
    trainer.model.save_pretrained(name)
    inner.save_state()
    card = dict.fromkeys((Path(name) / "README.md").read_text().splitlines(), True)
    head = trainer.model.model_head
    results = {
        "accuracy": trainer.evaluate(rows(12, 4) if held_out is None else held_out),
        "card": card,
        "head": head.coef_.tolist() if isinstance(head, LogisticRegression) else head.linear.weight.tolist(),
        "arguments": {
            field: str(getattr(inner.args, field))
            for field in ("learning_rate", "warmup_steps", "eval_strategy", "save_strategy", "logging_steps", "seed")
        },
        "notes": [] if notes is None else notes.notes,
    }
    Path(name, "setfit_results.json").write_text(json.dumps(results))


def pairs(name):
    """Cosine similarities of pairs; the best of the checkpoints, and a callback that sees all events."""
    args = TrainingArguments(
        output_dir=name,
        **QUICK,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        load_best_model_at_end=True,
        warmup_proportion=0.3,
    )
    notes = EventNotes()
    trainer = Trainer(
        classifier(), args, train_dataset=rows(8, 1), eval_dataset=rows(6, 2), metric=accuracy, callbacks=[notes]
    )
    finish(trainer, name, notes)


def triplets(name):
    """A triplet loss over batches by label; columns renamed; arguments that change between two trainings."""
    from setfit.compat import losses

    args = TrainingArguments(output_dir=name, **QUICK, loss=losses.BatchAllTripletLoss, save_strategy="no")
    data, held_out = (rows(count, 3, text="sentence", label="class") for count in (16, 12))
    names = {"sentence": "text", "class": "label"}
    trainer = Trainer(classifier(), args, train_dataset=data, metric=accuracy, column_mapping=names)
    trainer.train()
    settings = {**QUICK, "num_epochs": 2, "max_steps": 3, "loss": losses.BatchAllTripletLoss}
    again = TrainingArguments(output_dir=name, **settings, save_strategy="no")
    finish(trainer, name, held_out=held_out, args=again)


def head_of_torch(name):
    """A differentiable head, trained together with the body, and a model that model_init makes."""

    def create_model(params=None):
        torch.manual_seed(2)
        return classifier(SetFitHead(in_features=16, out_features=2))

    args = TrainingArguments(output_dir=name, **{**QUICK, "num_epochs": (1, 2)}, end_to_end=True, save_strategy="no")
    trainer = Trainer(model_init=create_model, args=args, train_dataset=rows(8, 1), metric=accuracy)
    finish(trainer, name)


def distilled(name):
    """A student of a trained classifier."""
    settings = TrainingArguments(output_dir=name, **QUICK, save_strategy="no")
    teacher = Trainer(classifier(), settings, train_dataset=rows(8, 1), metric=accuracy)
    teacher.train()
    student = DistillationTrainer(
        teacher_model=teacher.model,
        student_model=classifier(),
        args=settings,
        train_dataset=Dataset.from_dict({"text": rows(8, 6)["text"]}),
        metric=accuracy,
    )
    finish(student, name)


if __name__ == "__main__":
    assert issubclass(SetFitNotebookProgressCallback, TrainerCallback)
    pairs("pairs")
    triplets("triplets")
    head_of_torch("head_of_torch")
    distilled("distilled")
