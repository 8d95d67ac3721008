"""Model and data on Lightning's command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from littrainer import TrainerDataModule, TrainingArguments, TransformersModule
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, token_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import tiny_bert_classifier

pytest.importorskip("jsonargparse")

from lightning.pytorch.cli import LightningCLI

TRAINER: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class ConfigurableRows(TrainerDataModule):
    """A data module that creates its rows from options in `setup`."""

    def __init__(self, args: dict[str, Any] | None = None, rows: int = 8):
        super().__init__(args=args, data_collator=pad_tokens)
        self.rows = rows

    def setup(self, stage: str | None = None) -> None:
        self.train_dataset = Rows(token_rows(self.rows))
        self.eval_dataset = Rows(token_rows(4, seed=1))
        super().setup(stage)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a model of transformers."""
    folder = tmp_path_factory.mktemp("model")
    tiny_bert_classifier().save_pretrained(folder)
    return str(folder)


def cli(folder: Path, *options: str, module: type[TransformersModule] = TransformersModule) -> LightningCLI:
    return LightningCLI(
        module,
        ConfigurableRows,
        trainer_defaults={**TRAINER, "default_root_dir": str(folder)},
        save_config_kwargs={"overwrite": True},
        args=list(options),
    )


def test_options_and_a_file_set_arguments_of_the_model_and_its_data(tmp_path: Path, model_folder: str) -> None:
    file = {
        "model": {
            "model": model_folder,
            "args": {"learning_rate": 0.5, "optim": "sgd", "lr_scheduler_type": "constant"},
        },
        "data": {"args": {"per_device_train_batch_size": 4}, "rows": 12},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(file))
    options = ["--config", str(tmp_path / "run.yaml"), "--model.args.learning_rate=2e-3"]
    options.append("--model.compute_metrics=tests.scenarios.metrics.accuracy")
    done = cli(tmp_path, "fit", *options)
    assert done.trainer.global_step == 3
    assert type(done.model.model).__name__ == "BertForSequenceClassification"
    (optimizer,) = done.trainer.optimizers
    assert type(optimizer).__name__ == "SGD" and optimizer.param_groups[0]["lr"] == 2e-3
    assert done.model.compute_metrics is accuracy
    assert {"val_loss", "val_accuracy"} <= set(done.trainer.callback_metrics)
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert written["model"]["args"]["learning_rate"] == 2e-3 and written["data"]["rows"] == 12


class WidthAndKeywords(TransformersModule):
    """A subclass that passes further options through."""

    def __init__(self, hidden: int = 16, **kwargs: Any):
        super().__init__(tiny_bert_classifier(hidden_size=hidden), **kwargs)


@pytest.mark.parametrize("module", [TransformersModule, WidthAndKeywords])
def test_training_arguments_are_listed_with_their_types(
    tmp_path: Path, module: type[TransformersModule], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli(tmp_path, "fit", "--help", module=module)
    assert "--model.args.help" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli(tmp_path, "fit", "--model.args.help", module=module)
    page = " ".join(capsys.readouterr().out.split())
    about = TrainingArguments.__dataclass_fields__["learning_rate"].metadata["help"]
    assert f"--model.args.learning_rate LEARNING_RATE {about} (type: float)" in page
    assert "--model.args.max_steps" not in page


class UntypedOptions(TransformersModule):
    def __init__(self, args: dict | None = None):  # type: ignore[type-arg]
        super().__init__(tiny_bert_classifier(), args)


def test_numbers_are_parsed_in_a_plain_dict_too(tmp_path: Path) -> None:
    options = ("--model.args.learning_rate=1e-3", "--model.args.use_cache=false", "--trainer.limit_val_batches=0")
    args = cli(tmp_path, "validate", *options, module=UntypedOptions).model.args
    assert (args.learning_rate, args.use_cache) == (1e-3, False)


class SmallBert(TransformersModule):
    """A subclass with an option."""

    def __init__(self, args: dict[str, Any] | None = None, hidden: int = 16):
        super().__init__(tiny_bert_classifier(hidden_size=hidden), args, compute_metrics=accuracy)
        self.save_hyperparameters()


def test_a_subclass_adds_options(tmp_path: Path) -> None:
    done = cli(tmp_path, "fit", "--model.hidden=8", "--model.args.weight_decay=0.25", module=SmallBert)
    assert done.model.model.config.hidden_size == 8
    assert {group["weight_decay"] for group in done.trainer.optimizers[0].param_groups} == {0.0, 0.25}
    (checkpoint,) = (tmp_path / "checkpoints").glob("*.ckpt")
    loaded = SmallBert.load_from_checkpoint(checkpoint)
    assert loaded.model.config.hidden_size == 8 and loaded.args.weight_decay == 0.25
    # Options are read from the checkpoint.
    second = cli(tmp_path, "validate", "--ckpt_path", str(checkpoint), module=SmallBert)
    assert second.model.model.config.hidden_size == 8
    assert second.trainer.callback_metrics["val_loss"] == done.trainer.callback_metrics["val_loss"]


def test_a_file_names_the_function_that_creates_the_model(tmp_path: Path) -> None:
    file = {"model": {"model": "tests.scenarios.models.tiny_bert_tagger"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(file))
    module = cli(tmp_path, "validate", "--config", str(tmp_path / "run.yaml"), "--trainer.limit_val_batches=0").model
    module.configure_model()
    assert type(module.model).__name__ == "BertForTokenClassification"
    option = "--model.model=tests.scenarios.models.tiny_bert_tagger"
    assert cli(tmp_path, "validate", option, "--trainer.limit_val_batches=0").model.model is not None
