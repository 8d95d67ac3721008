"""What do averaged weights bring the docstring classifier, and where does its training spend its time?

Two things of Lightning's that take one line each in a Trainer: a callback that keeps an exponential moving average of
the weights, and a profiler. The texts, tokenizer and model are those of text_classification.py, and no network is
needed. It trains twice from the same seed, without and with the average, and shows both scores and the profile.

    littrainer run examples/ema_and_profiler.py
    python examples/ema_and_profiler.py

The callback is part of Lightning from its release 2.6 on.
"""

import argparse
from pathlib import Path

import datasets
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.profilers import SimpleProfiler
from small_tokenizers import train_wordpiece
from text_classification import MAX_TOKENS, build_model, load_texts, majority_scores, scores
from transformers import DataCollatorWithPadding, set_seed

from littrainer import Trainer, TrainingArguments


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="runs/ema_and_profiler", help="where the model and the profile go")
    parser.add_argument("--labels", type=int, default=5, help="how many packages to tell apart, the largest first")
    parser.add_argument("--texts", type=int, default=1200, help="docstrings to train on at most")
    parser.add_argument("--epochs", type=float, default=5, help="passes over the training texts")
    parser.add_argument("--decay", type=float, default=0.95, help="what of the average stays at each optimizer step")
    parser.add_argument("--seed", type=int, default=0, help="for the split, the initial weights and the data order")
    return parser.parse_args()


def slowest_actions(profiler, count):
    """(seconds, calls, name) of the named parts of the training that took longest."""
    durations = profiler.recorded_durations
    return sorted(((sum(seconds), len(seconds), name) for name, seconds in durations.items()), reverse=True)[:count]


def main():
    options = parse_options()
    datasets.disable_progress_bars()
    texts = load_texts(options.labels, options.seed, options.texts)
    packages = texts["train"].features["label"].names
    tokenizer = train_wordpiece(texts["train"]["text"], max_tokens=MAX_TOKENS)
    tokens = texts.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)

    def compute_metrics(prediction):
        return scores(prediction.predictions.argmax(axis=-1), prediction.label_ids, len(packages))

    def trained(**lightning):
        set_seed(options.seed)
        trainer = Trainer(
            model=build_model(tokenizer, packages),
            args=TrainingArguments(
                output_dir=options.output_dir,
                num_train_epochs=options.epochs,
                per_device_train_batch_size=32,
                per_device_eval_batch_size=64,
                learning_rate=3e-3,
                lr_scheduler_type="constant_with_warmup",
                warmup_steps=20,
                dataloader_pin_memory=False,
                logging_strategy="epoch",
                save_strategy="no",
                seed=options.seed,
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=tokens["train"],
            eval_dataset=tokens["test"],
            data_collator=DataCollatorWithPadding(tokenizer),
            processing_class=tokenizer,
            compute_metrics=compute_metrics,
            **lightning,
        )
        trainer.train()
        return trainer

    plain = trained().evaluate()
    profiler = SimpleProfiler(dirpath=options.output_dir, filename="profile")
    trainer = trained(callbacks=[EMAWeightAveraging(decay=options.decay)], lightning={"profiler": profiler})
    averaged = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()

    rows = {
        "majority label": majority_scores(texts, len(packages)),
        "last weights": {name.removeprefix("eval_"): value for name, value in plain.items()},
        "averaged weights": {name.removeprefix("eval_"): value for name, value in averaged.items()},
    }
    print(f"\n{'':18}accuracy  macro-F1")
    for name, row in rows.items():
        print(f"{name:18}{row['accuracy']:8.3f}{row['macro_f1']:10.3f}")
    print(f"evaluation loss: {plain['eval_loss']:.3f} without the average, {averaged['eval_loss']:.3f} with it")
    print(f"\n{'seconds':>8}{'calls':>8}  action")
    for seconds, calls, action in slowest_actions(profiler, count=8):
        print(f"{seconds:8.2f}{calls:8}  {action}")
    print(f"\nmodel:   {options.output_dir} (with the averaged weights)")
    for path in sorted(Path(options.output_dir).glob("*profile*")):
        print(f"profile: {path}")
    print(f"charts:  littrainer report {options.output_dir}")


if __name__ == "__main__":
    main()
