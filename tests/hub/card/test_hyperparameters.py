from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from littrainer import Trainer, TrainingArguments
from littrainer.hub.card.hyperparameters import hyperparameters
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

ALWAYS = (
    "learning_rate",
    "train_batch_size",
    "eval_batch_size",
    "seed",
    "optimizer",
    "lr_scheduler_type",
    "num_epochs",
)


@dataclass
class FurtherArguments(TrainingArguments):
    max_length: int = field(default=512)
    packing: bool = field(default=False)
    data_file: str = field(default="")
    service_api_key: str = field(default="")


def test_defaults_are_left_out_but_for_those_that_every_card_names(tmp_path: Path) -> None:
    assert tuple(hyperparameters(quiet_trainer(tmp_path))) == ALWAYS


def test_what_differs_from_its_default_is_named(tmp_path: Path) -> None:
    found = hyperparameters(
        quiet_trainer(
            tmp_path,
            weight_decay=0.1,
            warmup_steps=3,
            max_steps=7,
            gradient_accumulation_steps=2,
            neftune_noise_alpha=None,
            train_sampling_strategy="sequential",
        )
    )
    assert found["weight_decay"] == "0.1" and found["lr_scheduler_warmup_steps"] == "3"
    assert found["training_steps"] == "7" and "num_epochs" not in found
    assert found["gradient_accumulation_steps"] == "2" and found["total_train_batch_size"] == "8"
    assert found["train_sampling_strategy"] == "sequential"
    assert "neftune_noise_alpha" not in found


def test_where_files_lie_and_what_is_logged_is_not_named(tmp_path: Path) -> None:
    found = hyperparameters(
        quiet_trainer(tmp_path, run_name="private", logging_dir=str(tmp_path), hub_model_id="me/x", hub_token="hf_abc")
    )
    assert tuple(found) == ALWAYS


def test_folders_are_left_out_of_values(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path)
    trainer.args.fsdp_config = {"wrap_file": "/home/somebody/secret/wrap.json", "ratio": 0.5}
    found = hyperparameters(trainer)["fsdp_config"]
    assert "wrap.json" in found and "somebody" not in found


def test_an_optimizer_and_a_schedule_of_the_script_are_named_and_not_those_of_the_arguments(tmp_path: Path) -> None:
    model = VectorClassifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    found = hyperparameters(quiet_trainer(tmp_path, model, given={"optimizers": (optimizer, schedule)}))
    assert (
        found["optimizer"] == "SGD, made by the script" and found["lr_scheduler_type"] == "StepLR, made by the script"
    )


def test_after_training_the_optimizer_of_the_arguments_is_named_with_its_settings(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=1, optim="adamw_torch", adam_beta2=0.95)
    trainer.train()
    found = hyperparameters(trainer)
    assert found["optimizer"] == "adamw_torch with betas=(0.9, 0.95), epsilon=1e-08"
    assert found["lr_scheduler_type"] == "linear"


def test_numbers_and_switches_of_a_subclass_are_named_and_its_texts_and_secrets_are_not(tmp_path: Path) -> None:
    args = quiet_arguments(
        tmp_path, FurtherArguments, max_length=64, data_file="/home/somebody/x.csv", service_api_key="sk-1234567"
    )
    found = hyperparameters(Trainer(VectorClassifier(), args, train_dataset=Rows(vector_rows(4))))
    assert found["max_length"] == "64"
    assert not {"packing", "data_file", "service_api_key"} & found.keys()
