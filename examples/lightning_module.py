"""A plain Lightning program that trains a transformers model: the docstring classifier in a `lightning.Trainer`.

`TransformersModule` brings what transformers' Trainer knows about training a model (decay groups, schedule, loss per
token, metrics, weights that `from_pretrained` loads), `TrainerDataModule` what it knows about data; everything else is
Lightning as its users know it. The texts, tokenizer and model are those of text_classification.py, and no network is
needed.

    python examples/lightning_module.py
"""

import argparse
import csv
from pathlib import Path

import datasets
import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from small_tokenizers import train_wordpiece
from text_classification import MAX_TOKENS, build_model, load_texts, majority_scores, scores
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

from littrainer import TrainerDataModule, TransformersModule


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="runs/lightning_module", help="where the model and the log go")
    parser.add_argument("--labels", type=int, default=5, help="how many packages to tell apart, the largest first")
    parser.add_argument("--texts", type=int, default=1200, help="docstrings to train on at most")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training texts at most")
    parser.add_argument("--seed", type=int, default=0, help="for the split, the initial weights and the data order")
    return parser.parse_args()


def show_log(folder):
    """Print what was logged at the end of each epoch."""
    with (folder / "metrics.csv").open(newline="") as file:
        evaluations = [row for row in csv.DictReader(file) if row["val_loss"]]
    print(f"\n{'epoch':>5}{'step':>6}{'val_loss':>10}{'val_macro_f1':>14}")
    for row in evaluations:
        print(f"{row['epoch']:>5}{row['step']:>6}{float(row['val_loss']):10.3f}{float(row['val_macro_f1']):14.3f}")


def main():
    options = parse_options()
    datasets.disable_progress_bars()
    lightning.seed_everything(options.seed)
    texts = load_texts(options.labels, options.seed, options.texts)
    packages = texts["train"].features["label"].names
    tokenizer = train_wordpiece(texts["train"]["text"], max_tokens=MAX_TOKENS)
    tokens = texts.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)

    def compute_metrics(prediction):
        return scores(prediction.predictions.argmax(axis=-1), prediction.label_ids, len(packages))

    # Any of TrainingArguments that is about the model or its data. Epochs, precision, accumulation and devices are the
    # lightning.Trainer's, as in any Lightning program.
    args = {
        "learning_rate": 2e-3,
        "warmup_steps": 20,
        "weight_decay": 0.01,
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 64,
        "dataloader_pin_memory": False,
        "seed": options.seed,
    }
    module = TransformersModule(
        build_model(tokenizer, packages), args, processing_class=tokenizer, compute_metrics=compute_metrics
    )
    data = TrainerDataModule(
        train_dataset=tokens["train"],
        eval_dataset=tokens["test"],
        args=args,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    logger = CSVLogger(options.output_dir, name="log")
    best = ModelCheckpoint(f"{options.output_dir}/checkpoints", monitor="val_macro_f1", mode="max")
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        logger=logger,
        log_every_n_steps=10,
        callbacks=[best, EarlyStopping("val_loss", patience=2), LearningRateMonitor()],
    )
    trainer.fit(module, data)
    show_log(Path(logger.log_dir))
    (found,) = trainer.validate(module, data, ckpt_path="best", verbose=False)
    # The weights are the best checkpoint's: validate has loaded them.
    module.export_pretrained(options.output_dir)

    baseline = majority_scores(texts, len(packages))
    print(f"\n{'':18}accuracy  macro-F1")
    print(f"{'majority label':18}{baseline['accuracy']:8.3f}{baseline['macro_f1']:10.3f}")
    print(f"{'this model':18}{found['val_accuracy']:8.3f}{found['val_macro_f1']:10.3f}")

    loaded = AutoModelForSequenceClassification.from_pretrained(options.output_dir)
    text = max(texts["test"]["text"], key=len)
    with torch.no_grad():
        answer = loaded(**tokenizer(text, truncation=True, return_tensors="pt")).logits.argmax().item()
    print(f'\n"{text[:60]} ..." comes from {loaded.config.id2label[answer]}')
    print(f"model:  {options.output_dir}")
    print(f"charts: littrainer report {options.output_dir}")


if __name__ == "__main__":
    main()
