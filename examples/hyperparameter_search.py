"""Which learning rate suits the docstring classifier?

An ordinary transformers script that needs no network. Its texts, tokenizer and model are those of
text_classification.py. It trains once with the default learning rate, lets Optuna try others on texts held back from
training, trains with the best one, and compares both on evaluation texts that the search has not seen.

    python examples/hyperparameter_search.py
    littrainer run examples/hyperparameter_search.py
    littrainer report runs/hyperparameter_search
"""

import argparse

import datasets
import optuna
from small_tokenizers import train_wordpiece
from text_classification import MAX_TOKENS, build_model, load_texts, scores
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

OBJECTIVE = "eval_macro_f1"


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="runs/hyperparameter_search", help="where trials and their record go")
    parser.add_argument("--trials", type=int, default=8, help="how many settings to try")
    parser.add_argument("--labels", type=int, default=4, help="how many packages to tell apart, the largest first")
    parser.add_argument("--texts", type=int, default=1000, help="docstrings to train on at most")
    parser.add_argument("--epochs", type=float, default=4, help="passes over the training texts in each trial")
    parser.add_argument("--seed", type=int, default=0, help="for the split, the initial weights and what is tried")
    return parser.parse_args()


def search_space(trial):
    """What is tried: learning rates by their power of ten, and how fast weights decay."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-5, 3e-2, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 0.0, 0.3),
    }


def main():
    options = parse_options()
    datasets.disable_progress_bars()
    texts = load_texts(options.labels, options.seed, options.texts)
    packages = texts["train"].features["label"].names
    tokenizer = train_wordpiece(texts["train"]["text"], max_tokens=MAX_TOKENS)
    tokens = texts.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)
    # The search is judged by texts of its own, so that the evaluation texts can tell whether it found something.
    held_back = tokens["train"].train_test_split(test_size=0.2, seed=options.seed, stratify_by_column="label")

    def compute_metrics(prediction):
        return scores(prediction.predictions.argmax(axis=-1), prediction.label_ids, len(packages))

    trainer = Trainer(
        model_init=lambda: build_model(tokenizer, packages),
        args=TrainingArguments(
            output_dir=options.output_dir,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=64,
            dataloader_pin_memory=False,
            logging_strategy="epoch",
            eval_strategy="epoch",
            save_strategy="no",
            seed=options.seed,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=held_back["train"],
        eval_dataset=held_back["test"],
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    default = trainer.args.learning_rate
    trainer.train()
    before = trainer.evaluate(tokens["test"])[OBJECTIVE]

    best = trainer.hyperparameter_search(
        search_space,
        compute_objective=lambda metrics: metrics[OBJECTIVE],
        n_trials=options.trials,
        direction="maximize",
        backend="optuna",
        sampler=optuna.samplers.TPESampler(seed=options.seed, n_startup_trials=5),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    for name, value in best.hyperparameters.items():
        setattr(trainer.args, name, value)
    trainer.train()
    after = trainer.evaluate(tokens["test"])[OBJECTIVE]
    trainer.save_state()

    print(f"\n{'learning rate':24}macro-F1 on {len(tokens['test'])} texts that the search has not seen")
    print(f"{f'{default:.2e} (default)':24}{before:.3f}")
    found = f"{best.hyperparameters['learning_rate']:.2e} (trial {best.run_id})"
    print(f"{found:24}{after:.3f}")
    print(f"\ntrials: {options.output_dir}")
    print(f"charts: littrainer report {options.output_dir}")


if __name__ == "__main__":
    main()
