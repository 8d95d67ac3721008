"""One of two processes that train a Keras model with moving statistics: `python -m ... FOLDER`, KERAS_BACKEND=torch.

Each writes to `FOLDER/RANK.pickle` what its statistics are after the last optimizer step and after an evaluation.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

from littrainer import TFTrainer, TFTrainingArguments


def main(folder: Path) -> None:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([layers.Input((4,)), layers.BatchNormalization(), layers.Dense(2)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    features = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    pairs = [(row, int(row.sum() > 0)) for row in features]
    args = TFTrainingArguments(
        str(folder / "out"),
        max_steps=2,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = TFTrainer(model, args, train_dataset=pairs, eval_dataset=pairs)

    def mean() -> list[float]:
        return np.asarray(model.layers[0].moving_mean).tolist()

    trainer.train()
    found = {"trained": mean()}
    trainer.evaluate()
    found["evaluated"] = mean()
    trainer.save_model(str(folder / "saved"))
    (folder / f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
