"""A plain torch module reads handwritten digits: a Trainer needs neither a tokenizer nor a transformers model.

The 1797 images of 8x8 pixels come with scikit-learn. The model is an ordinary nn.Module whose forward returns a dict
with the logits and, where labels are given, the loss. Its accuracy on images that it has not seen is compared with
that of scikit-learn's logistic regression.

    python examples/digits.py
    littrainer run examples/digits.py

Both lines print the same numbers; the second one trains on Lightning. Needs scikit-learn.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_model
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="runs/digits", help="where the model goes")
    parser.add_argument("--images", type=int, default=1347, help="images to train on at most")
    parser.add_argument("--epochs", type=float, default=15, help="passes over the training images")
    parser.add_argument("--batch_size", type=int, default=64, help="images per optimizer step")
    parser.add_argument("--learning_rate", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="for the split, the initial weights and the data order")
    return parser.parse_args()


class DigitReader(nn.Module):
    """Two convolutions and a linear layer over images of 8x8 pixels between 0 and 1."""

    def __init__(self, channels=16):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * 4 * 4, 10),
        )

    # The names of the parameters are those of the columns in the data.
    def forward(self, pixels, labels=None):
        output = {"logits": self.layers(pixels.unsqueeze(1))}
        if labels is not None:
            output["loss"] = nn.functional.cross_entropy(output["logits"], labels)
        return output


def load_images(most_to_train_on, seed):
    """Training and test images as (pixels, digits) each, three to one, every digit in the same proportion."""
    pixels, digits = load_digits(return_X_y=True)
    pixels = (pixels / 16).astype(np.float32).reshape(-1, 8, 8)
    train_pixels, test_pixels, train_digits, test_digits = train_test_split(
        pixels, digits, test_size=0.25, stratify=digits, random_state=seed
    )
    return (train_pixels[:most_to_train_on], train_digits[:most_to_train_on]), (test_pixels, test_digits)


def as_dataset(pixels, digits):
    """A list is a dataset too; its items are what forward is called with."""
    return [{"pixels": image, "labels": int(digit)} for image, digit in zip(pixels, digits, strict=True)]


def logistic_regression_accuracy(train, test):
    """The share of test images that a linear model without any idea of neighbouring pixels names rightly."""
    (train_pixels, train_digits), (test_pixels, test_digits) = train, test
    regression = LogisticRegression(max_iter=1000).fit(train_pixels.reshape(-1, 64), train_digits)
    return regression.score(test_pixels.reshape(-1, 64), test_digits)


def compute_metrics(prediction):
    return {"accuracy": float((prediction.predictions.argmax(axis=-1) == prediction.label_ids).mean())}


def main():
    options = parse_options()
    set_seed(options.seed)
    train, test = load_images(options.images, options.seed)
    print(f"{len(train[0])} images to train on, {len(test[0])} to test on")

    arguments = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=256,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        logging_strategy="epoch",
        eval_strategy="epoch",
        save_strategy="no",
        dataloader_pin_memory=False,
        seed=options.seed,
        report_to="none",
    )
    trainer = Trainer(
        model=DigitReader(),
        args=arguments,
        train_dataset=as_dataset(*train),
        eval_dataset=as_dataset(*test),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()

    # What was saved is read into a new model, as another program would do it.
    saved = DigitReader()
    load_model(saved, Path(options.output_dir) / "model.safetensors")
    saved.eval()
    with torch.no_grad():
        answers = saved(torch.from_numpy(test[0]))["logits"].argmax(dim=-1)
    accuracy = float((answers.numpy() == test[1]).mean())

    print(f"\n{'':20}accuracy")
    print(f"{'logistic regression':20}{logistic_regression_accuracy(train, test):8.3f}")
    print(f"{'this model':20}{accuracy:8.3f}")
    print(f"\nmodel:  {options.output_dir}/model.safetensors (load it with safetensors.torch.load_model)")
    print(f"charts: littrainer report {options.output_dir}")


if __name__ == "__main__":
    main()
