"""The docstring classifier on Lightning's command line: arguments of model, data and trainer as options.

    python examples/lightning_cli.py fit
    python examples/lightning_cli.py fit --model.args.learning_rate=1e-3 --data.labels=8 --trainer.max_epochs=4
    python examples/lightning_cli.py fit --print_config > run.yaml      # edit it, then:
    python examples/lightning_cli.py fit --config run.yaml
    python examples/lightning_cli.py validate --config run.yaml --ckpt_path runs/lightning_cli/checkpoints/last.ckpt

It needs jsonargparse: pip install "jsonargparse[signatures]". The texts and the tokenizer are those of
text_classification.py, and no network is needed.
"""

from typing import Any

import datasets
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from small_tokenizers import train_wordpiece
from text_classification import MAX_TOKENS, load_texts, scores
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding

from littrainer import TrainerDataModule, TransformersModule

OUTPUT_DIR = "runs/lightning_cli"


class DocstringClassifier(TransformersModule):
    """A small BERT with fresh weights.

    Args:
        args: Arguments of transformers' Trainer that are about the model: optimizer, schedule, metrics.
        labels: How many packages to tell apart.
        vocabulary_size: How many tokens there are at most.
        hidden_size: Width of a layer.
        layers: How many layers.
    """

    def __init__(
        self,
        args: dict[str, Any] | None = None,
        labels: int = 5,
        vocabulary_size: int = 4000,
        hidden_size: int = 96,
        layers: int = 2,
    ):
        config = BertConfig(
            vocab_size=vocabulary_size,
            hidden_size=hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=2 * hidden_size,
            max_position_embeddings=MAX_TOKENS,
            num_labels=labels,
        )
        super().__init__(BertForSequenceClassification(config), args, compute_metrics=self.scores)
        # For load_from_checkpoint, and for --ckpt_path on the command line.
        self.save_hyperparameters()

    def scores(self, prediction):
        """Accuracy and macro-F1 of one evaluation."""
        return scores(prediction.predictions.argmax(axis=-1), prediction.label_ids, self.model.config.num_labels)


class Docstrings(TrainerDataModule):
    """Docstrings of the standard library with the packages that they come from, as token ids.

    Args:
        args: Arguments of transformers' Trainer that are about data: batch sizes, workers, sampling.
        labels: How many packages to tell apart, the largest first.
        texts: How many docstrings to train on at most.
        vocabulary_size: How many tokens the tokenizer may have.
        seed: For the split.
    """

    def __init__(
        self,
        args: dict[str, Any] | None = None,
        labels: int = 5,
        texts: int = 1200,
        vocabulary_size: int = 4000,
        seed: int = 0,
    ):
        super().__init__(args=args)
        self.labels = labels
        self.texts = texts
        self.vocabulary_size = vocabulary_size
        self.seed = seed

    def setup(self, stage):
        """Read the texts, and train the tokenizer on those for training."""
        if self.train_dataset is None:
            datasets.disable_progress_bars()
            texts = load_texts(self.labels, self.seed, self.texts)
            tokenizer = train_wordpiece(texts["train"]["text"], self.vocabulary_size, MAX_TOKENS)
            tokens = texts.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)
            self.train_dataset, self.eval_dataset = tokens["train"], tokens["test"]
            self.data_collator = DataCollatorWithPadding(tokenizer)
        super().setup(stage)


class DocstringCLI(LightningCLI):
    """What model and data have to agree on is given once, to the data."""

    def add_arguments_to_parser(self, parser):
        for name in ("labels", "vocabulary_size"):
            parser.link_arguments(f"data.{name}", f"model.{name}")
        parser.set_defaults(
            {
                "model.args": {"learning_rate": 2e-3, "warmup_steps": 20, "weight_decay": 0.01},
                "data.args": {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 64},
            }
        )


def main(arguments=None):
    cli = DocstringCLI(
        DocstringClassifier,
        Docstrings,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={
            "accelerator": "cpu",
            "max_epochs": 5,
            "gradient_clip_val": 1.0,
            "default_root_dir": OUTPUT_DIR,
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": OUTPUT_DIR}},
            "callbacks": [ModelCheckpoint(f"{OUTPUT_DIR}/checkpoints", monitor="val_loss", save_last=True)],
        },
        args=arguments,
    )
    print(f"charts: littrainer report {cli.trainer.default_root_dir}")
    return cli


if __name__ == "__main__":
    main()
