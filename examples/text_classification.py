"""Which package of the standard library does a docstring come from?

An ordinary transformers script that needs no network. Its texts are the docstrings in the Python standard library on
this machine, its labels the packages they document (local_texts.py). It trains a WordPiece tokenizer on the texts
(small_tokenizers.py) and a small BERT from scratch, evaluates after every epoch and keeps the best checkpoint.

    python examples/text_classification.py
    littrainer run examples/text_classification.py

Both lines print the same numbers; the second one trains on Lightning.
"""

import argparse
from collections import Counter
from pathlib import Path

import datasets
import matplotlib
import numpy as np
from datasets import ClassLabel, Dataset, Features, Value
from local_texts import read_docstrings
from small_tokenizers import train_wordpiece
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MAX_TOKENS = 48


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="runs/text_classification", help="where the model and the curves go")
    parser.add_argument("--labels", type=int, default=10, help="how many packages to tell apart, the largest first")
    parser.add_argument("--epochs", type=float, default=8, help="passes over the training texts")
    parser.add_argument("--batch_size", type=int, default=32, help="docstrings per optimizer step")
    parser.add_argument("--learning_rate", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="for the split, the initial weights and the data order")
    return parser.parse_args()


# ---------------------------------------------------------------- texts


def load_texts(label_count, seed, most_to_train_on=None):
    """Training and evaluation texts, four to one, with every package in the same proportion on both sides."""
    documented = read_docstrings()
    sizes = Counter(package for _, package in documented)
    packages = sorted(sizes, key=lambda package: (-sizes[package], package))[:label_count]
    rows = [(text, package) for text, package in documented if package in packages]
    columns = {"text": [text for text, _ in rows], "label": [package for _, package in rows]}
    features = Features({"text": Value("string"), "label": ClassLabel(names=packages)})
    texts = Dataset.from_dict(columns, features=features)
    texts = texts.train_test_split(test_size=0.2, seed=seed, stratify_by_column="label")
    if most_to_train_on is not None and len(texts["train"]) > most_to_train_on:
        texts["train"] = texts["train"].shuffle(seed=seed).select(range(most_to_train_on))
    return texts


# ---------------------------------------------------------------- model


def build_model(tokenizer, packages):
    """A BERT of two layers with fresh weights."""
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=192,
        max_position_embeddings=MAX_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(packages)),
        label2id={package: number for number, package in enumerate(packages)},
    )
    return BertForSequenceClassification(config)


# ---------------------------------------------------------------- scores and curves


def scores(predicted, expected, label_count):
    """Accuracy, and the F1 of each label averaged without regard to how frequent it is."""
    confusion = np.zeros((label_count, label_count))
    np.add.at(confusion, (expected, predicted), 1)
    hits = confusion.diagonal()
    f1 = 2 * hits / np.maximum(confusion.sum(axis=0) + confusion.sum(axis=1), 1)
    return {"accuracy": float(hits.sum() / confusion.sum()), "macro_f1": float(f1.mean())}


def majority_scores(texts, label_count):
    """What answering the most frequent training label every time would score."""
    answer = np.bincount(texts["train"]["label"]).argmax()
    expected = np.array(texts["test"]["label"])
    return scores(np.full_like(expected, answer), expected, label_count)


def draw_curves(history, baseline, path):
    """Write a picture of the losses and scores over the epochs."""

    def curve(name):
        return zip(*((entry["epoch"], entry[name]) for entry in history if name in entry), strict=True)

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(*curve("loss"), color="tab:gray", linewidth=1, label="training")
    left.plot(*curve("eval_loss"), color="tab:blue", marker="o", markersize=4, label="evaluation")
    left.set(title="Loss", xlabel="epoch", ylabel="cross-entropy", ylim=(0, None))
    right.plot(*curve("eval_accuracy"), color="tab:blue", marker="o", markersize=4, label="accuracy")
    right.plot(*curve("eval_macro_f1"), color="tab:orange", marker="s", markersize=4, label="macro-F1")
    right.axhline(baseline["accuracy"], color="tab:blue", linestyle=":", label="accuracy, majority label")
    right.axhline(baseline["macro_f1"], color="tab:orange", linestyle=":", label="macro-F1, majority label")
    right.set(title="Scores on the evaluation texts", xlabel="epoch", ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# ---------------------------------------------------------------- the run


def main():
    options = parse_options()
    set_seed(options.seed)
    datasets.disable_progress_bars()

    texts = load_texts(options.labels, options.seed)
    packages = texts["train"].features["label"].names
    baseline = majority_scores(texts, len(packages))
    print(f"{len(texts['train'])} docstrings to train on, {len(texts['test'])} to evaluate on")
    print(f"labels: {', '.join(packages)}")

    tokenizer = train_wordpiece(texts["train"]["text"], max_tokens=MAX_TOKENS)
    tokens = texts.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)

    def compute_metrics(prediction):
        return scores(prediction.predictions.argmax(axis=-1), prediction.label_ids, len(packages))

    arguments = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=64,
        learning_rate=options.learning_rate,
        warmup_steps=50,
        weight_decay=0.01,
        logging_steps=20,
        dataloader_pin_memory=False,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="macro_f1",
        greater_is_better=True,
        seed=options.seed,
        report_to="none",
    )
    trainer = Trainer(
        model=build_model(tokenizer, packages),
        args=arguments,
        train_dataset=tokens["train"],
        eval_dataset=tokens["test"],
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    picture = Path(options.output_dir) / "curves.png"
    draw_curves(trainer.state.log_history, baseline, picture)

    best = trainer.evaluate()
    trainer.save_metrics("eval", best)
    trainer.save_model()
    trainer.save_state()

    print(f"\n{'':18}accuracy  macro-F1")
    print(f"{'majority label':18}{baseline['accuracy']:8.3f}{baseline['macro_f1']:10.3f}")
    print(f"{'this model':18}{best['eval_accuracy']:8.3f}{best['eval_macro_f1']:10.3f}")
    print(f"\nmodel:  {options.output_dir} (load it with AutoModelForSequenceClassification.from_pretrained)")
    print(f"curves: {picture}")
    print(f"charts: littrainer report {options.output_dir}")


if __name__ == "__main__":
    main()
