"""Training with sentence-transformers, in several set-ups."""

import json
import random
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    InputExample,
    MultiVectorEncoder,
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    SparseEncoder,
    SparseEncoderTrainer,
    SparseEncoderTrainingArguments,
)
from sentence_transformers.cross_encoder.evaluation import CrossEncoderClassificationEvaluator
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss, LambdaLoss
from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator, TripletEvaluator
from sentence_transformers.sentence_transformer.training_args import BatchSamplers, MultiDatasetBatchSamplers
from sentence_transformers.sparse_encoder.evaluation import SparseEmbeddingSimilarityEvaluator
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
from small_bert import copy_parameter_memory, sentence, write_bert
from torch.utils.data import DataLoader
from transformers import BertForMaskedLM, BertForSequenceClassification, BertModel, TrainerCallback

QUICK = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "seed": 11,
}


def rows(count, seed, label=None, negatives=False):
    """Pairs or triplets of sentences; the label is a score between 0 and 1, or a class."""
    draws = random.Random(seed)
    columns = {name: [sentence(draws) for _ in range(count)] for name in ("anchor", "positive")}
    if negatives:
        columns["negative"] = [sentence(draws) for _ in range(count)]
    if label is not None:
        columns["label"] = [draws.random() if label == "score" else draws.randrange(2) for _ in range(count)]
    return Dataset.from_dict(columns)


def embedding_model():
    return copy_parameter_memory(SentenceTransformer(write_bert(BertModel), device="cpu"))


def cross_encoder():
    folder = write_bert(BertForSequenceClassification, num_labels=1)
    return copy_parameter_memory(CrossEncoder(folder, device="cpu", num_labels=1))


def finish(trainer, **keywords):
    trainer.train(**keywords)
    trainer.save_model()
    trainer.save_state()
    folder = Path(trainer.args.output_dir)
    lines = (folder / "README.md").read_text().splitlines()
    card = {line: True for line in lines if not line.endswith(" seconds")}
    (folder / "card_results.json").write_text(json.dumps(card))


class EventNotes(TrainerCallback):
    """Writes down which events came, and which learning rate and optimizer step each saw."""

    def __init__(self):
        self.notes = []

    def on_step_end(self, args, state, control, optimizer, lr_scheduler, model, processing_class, **kwargs):
        names = [type(item).__name__ for item in (model, processing_class)]
        self.notes.append(["step", state.global_step, *names, optimizer.param_groups[0]["lr"]])

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.notes.append(["evaluate", state.global_step, *(name for name in metrics if "runtime" not in name)])

    def on_train_end(self, args, state, control, train_dataloader, **kwargs):
        self.notes.append(["end", state.global_step, len(train_dataloader)])
        Path(args.output_dir, "event_results.json").write_text(json.dumps(self.notes))


def similarity(name, resume=None):
    """Cosine similarities, an evaluator, checkpoints, and the best of them at the end."""
    model, scored = embedding_model(), rows(8, 2, "score")
    args = SentenceTransformerTrainingArguments(
        output_dir=name,
        **{**QUICK, "save_strategy": "steps"},
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        warmup_ratio=0.2,
        load_best_model_at_end=resume is None,
        metric_for_best_model="eval_dev_spearman_cosine",
    )
    trainer = SentenceTransformerTrainer(
        model,
        args,
        train_dataset=rows(18, 1, "score"),
        eval_dataset=scored,
        loss=losses.CoSENTLoss(model),
        evaluator=EmbeddingSimilarityEvaluator(scored["anchor"], scored["positive"], scored["label"], name="dev"),
        callbacks=[EventNotes()],
    )
    finish(trainer, resume_from_checkpoint=resume)


def matryoshka(name):
    """An evaluator in the place of an evaluation dataset, hard negatives, no text twice in a batch."""
    model, held_out = embedding_model(), rows(8, 3, negatives=True)
    args = SentenceTransformerTrainingArguments(
        output_dir=name, **QUICK, eval_strategy="epoch", batch_sampler=BatchSamplers.NO_DUPLICATES
    )
    trainer = SentenceTransformerTrainer(
        model,
        args,
        train_dataset=rows(18, 1, negatives=True),
        loss=losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [16, 8]),
        evaluator=[TripletEvaluator(held_out["anchor"], held_out["positive"], held_out["negative"])],
    )
    finish(trainer)


def several_datasets(name, order):
    """A loss for each dataset; one has parameters with a separate learning rate."""
    model = embedding_model()
    data = {"classes": rows(10, 3, "class"), "scores": rows(13, 4, "score"), "pairs": rows(9, 5)}
    args = SentenceTransformerTrainingArguments(
        output_dir=name,
        **QUICK,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        multi_dataset_batch_sampler=order,
        prompts={"classes": "fox dog ", "scores": "sea "},
        learning_rate_mapping={"classifier": 1e-2},
    )
    trainer = SentenceTransformerTrainer(
        model,
        args,
        train_dataset=data,
        eval_dataset={name: data[name] for name in ("classes", "scores")},
        loss={
            "classes": losses.SoftmaxLoss(model, 16, num_labels=2),
            "scores": losses.CosineSimilarityLoss(model),
            "pairs": losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2),
        },
    )
    finish(trainer)


def recreate(name):
    """A model that model_init makes, and a loss made for it."""
    draws = random.Random(5)
    data = Dataset.from_dict({"text": [sentence(draws) for _ in range(24)], "label": [i % 3 for i in range(24)]})
    pairs = Dataset.from_dict({"anchor": data["text"][:12], "positive": data["text"][12:]})
    args = SentenceTransformerTrainingArguments(output_dir=name, **QUICK)
    trainer = SentenceTransformerTrainer(
        args=args,
        model_init=embedding_model,
        train_dataset=pairs,
        loss=lambda model: losses.MultipleNegativesSymmetricRankingLoss(model),
    )
    finish(trainer)

    model = embedding_model()
    args = SentenceTransformerTrainingArguments(
        output_dir=f"{name}_by_label", **QUICK, batch_sampler=BatchSamplers.GROUP_BY_LABEL
    )
    finish(SentenceTransformerTrainer(model, args, train_dataset=data, loss=losses.BatchAllTripletLoss(model)))


def streamed_adapter(name):
    """LoRA on a stream of pairs, with AdaFactor and a cosine schedule."""
    model = embedding_model()
    model.add_adapter(LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.1))
    settings = {**QUICK, "max_steps": 5, "optim": "adafactor", "lr_scheduler_type": "cosine"}
    args = SentenceTransformerTrainingArguments(output_dir=name, **settings)
    stream = rows(14, 8).to_iterable_dataset()
    loss = losses.MultipleNegativesRankingLoss(model)
    finish(SentenceTransformerTrainer(model, args, train_dataset=stream, loss=loss))


def fit(name):
    """The interface from before version 3."""
    model, scored = embedding_model(), rows(8, 2, "score")
    examples = [InputExample(texts=[row["anchor"], row["positive"]], label=row["label"]) for row in scored]
    pairs = [InputExample(texts=[row["anchor"], row["positive"]]) for row in rows(9, 9)]
    torch.manual_seed(3)
    scores = []
    model.fit(
        [
            (DataLoader(examples, shuffle=True, batch_size=4), losses.CosineSimilarityLoss(model)),
            (DataLoader(pairs, shuffle=True, batch_size=4), losses.MultipleNegativesRankingLoss(model)),
        ],
        evaluator=EmbeddingSimilarityEvaluator(scored["anchor"], scored["positive"], scored["label"]),
        epochs=2,
        warmup_steps=2,
        evaluation_steps=3,
        output_path=name,
        checkpoint_path=f"{name}/checkpoints",
        checkpoint_save_steps=4,
        callback=lambda score, epoch, steps: scores.append([score, epoch, steps]),
        show_progress_bar=False,
    )
    Path(name, "score_results.json").write_text(json.dumps(scores))


def cross_encoding(name):
    """A classifier of pairs."""
    model, held_out = cross_encoder(), rows(8, 6, "class")
    args = CrossEncoderTrainingArguments(
        output_dir=name,
        **{**QUICK, "save_strategy": "epoch"},
        eval_strategy="epoch",
        load_best_model_at_end=True,
        save_total_limit=1,
    )
    trainer = CrossEncoderTrainer(
        model,
        args,
        train_dataset=rows(14, 7, "class"),
        eval_dataset=held_out,
        loss=BinaryCrossEntropyLoss(model),
        evaluator=CrossEncoderClassificationEvaluator(
            list(zip(held_out["anchor"], held_out["positive"], strict=True)), held_out["label"]
        ),
    )
    finish(trainer)


def ranking(name):
    """A listwise loss over documents of different number."""
    draws, model = random.Random(9), cross_encoder()
    sizes = [draws.randint(2, 4) for _ in range(8)]
    data = Dataset.from_dict(
        {
            "query": [sentence(draws) for _ in sizes],
            "docs": [[sentence(draws) for _ in range(size)] for size in sizes],
            "labels": [[draws.randrange(3) for _ in range(size)] for size in sizes],
        }
    )
    args = CrossEncoderTrainingArguments(output_dir=name, **QUICK)
    finish(CrossEncoderTrainer(model, args, train_dataset=data, loss=LambdaLoss(model)))


def sparse(name):
    """SPLADE, whose loss has components that are logged and weights that a callback raises."""
    model = copy_parameter_memory(SparseEncoder(write_bert(BertForMaskedLM), device="cpu"))
    scored = rows(8, 6, "score")
    args = SparseEncoderTrainingArguments(output_dir=name, **QUICK, eval_strategy="steps", eval_steps=4)
    loss = SpladeLoss(
        model,
        SparseMultipleNegativesRankingLoss(model),
        document_regularizer_weight=3e-2,
        query_regularizer_weight=5e-2,
    )
    trainer = SparseEncoderTrainer(
        model,
        args,
        train_dataset=rows(14, 7),
        eval_dataset=rows(6, 8),
        loss=loss,
        evaluator=SparseEmbeddingSimilarityEvaluator(scored["anchor"], scored["positive"], scored["label"]),
    )
    finish(trainer)


def several_vectors(name):
    """An embedding for each token."""
    model = copy_parameter_memory(MultiVectorEncoder(write_bert(BertModel), device="cpu"))
    args = MultiVectorEncoderTrainingArguments(output_dir=name, **QUICK, eval_strategy="epoch")
    trainer = MultiVectorEncoderTrainer(
        model,
        args,
        train_dataset=rows(14, 7, negatives=True),
        eval_dataset=rows(6, 8, negatives=True),
        loss=MultiVectorMultipleNegativesRankingLoss(model),
    )
    finish(trainer)


if __name__ == "__main__":
    torch.manual_seed(0)
    similarity("similarity")
    similarity("similarity_resumed", resume="similarity/checkpoint-6")
    matryoshka("matryoshka")
    several_datasets("datasets_in_turn", MultiDatasetBatchSamplers.ROUND_ROBIN)
    several_datasets("datasets_by_size", MultiDatasetBatchSamplers.PROPORTIONAL)
    recreate("recreate")
    streamed_adapter("streamed_adapter")
    fit("fit")
    cross_encoding("cross_encoding")
    ranking("ranking")
    sparse("sparse")
    several_vectors("several_vectors")
