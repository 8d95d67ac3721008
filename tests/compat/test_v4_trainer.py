"""Uses of a Trainer in scripts for transformers 4."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import Trainer
from tests.scenarios.trainers import quiet_trainer

# Method of transformers 4.57 that 5 lacks, or has with fewer parameters -> required, and optional parameters.
PARAMETERS: dict[str, tuple[str, str]] = {
    "num_tokens": ("train_dl", "max_steps"),
    "_save_checkpoint": ("model trial", "metrics"),
    "_rotate_checkpoints": ("", "use_mtime output_dir"),
    "_nested_gather": ("tensors", "name"),
    "prediction_loop": ("dataloader description", "prediction_loss_only ignore_keys metric_key_prefix"),
    "set_initial_training_values": ("args dataloader total_train_batch_size", ""),
}
# Method -> parameters of earlier releases.
SHORTER = {"get_batch_samples": "epoch_iterator num_batches", "_maybe_log_save_evaluate": "1 2 3 4 5 6"}


class Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.txt").write_text("saved", encoding="utf-8")


def make_trainer(folder: Path, cls: type[Trainer] = Trainer, **keywords: Any) -> Any:
    steps = {"max_steps": 3, "gradient_accumulation_steps": 2, "logging_strategy": "steps", "logging_steps": 1}
    return quiet_trainer(folder, kind=cls, trainer_kwargs={"data_collator": None, **keywords}, **steps)


def test_a_tokenizer_becomes_the_processing_class(tmp_path: Path) -> None:
    tokenizer = Tokenizer()
    with pytest.warns(FutureWarning, match="write processing_class"):
        trainer = make_trainer(tmp_path, tokenizer=tokenizer, data_collator=torch.utils.data.default_collate)
    assert trainer.processing_class is tokenizer
    with pytest.warns(FutureWarning, match="trainer.processing_class"):
        assert trainer.tokenizer is tokenizer
    other = Tokenizer()
    with pytest.warns(FutureWarning, match="trainer.processing_class"):
        trainer.tokenizer = other
    assert trainer.processing_class is other
    with pytest.raises(TypeError, match="both tokenizer and processing_class"):
        Trainer(model=torch.nn.Linear(1, 1), tokenizer=tokenizer, processing_class=tokenizer)  # type: ignore[call-arg]


def test_a_subclass_may_set_its_tokenizer_attribute(tmp_path: Path) -> None:
    class WithTokenizer(Trainer):
        def __init__(self, *values: Any, **keywords: Any) -> None:
            self.tokenizer = "of the subclass"
            super().__init__(*values, **keywords)

    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        trainer = make_trainer(tmp_path, WithTokenizer)
        assert (trainer.tokenizer, trainer.processing_class) == ("of the subclass", None)


def test_earlier_methods_and_keywords_work(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with (
        pytest.warns(FutureWarning, match="write resume_from_checkpoint"),
        pytest.raises(ValueError, match="not-there"),
    ):
        trainer.train(model_path=str(tmp_path / "not-there"))
    loader = trainer.get_eval_dataloader()
    with pytest.warns(FutureWarning, match="evaluation_loop"):
        old = trainer.prediction_loop(loader, "Evaluation", metric_key_prefix="old")
    new = trainer.evaluation_loop(loader, "Evaluation")
    assert old.metrics["old_loss"] == new.metrics["eval_loss"]
    assert (old.predictions == new.predictions).all()

    batches = [{"input_ids": torch.zeros(2, 3)}, {"input_ids": torch.zeros(1, 5)}]
    assert [Trainer.num_tokens(batches), Trainer.num_tokens(batches, max_steps=10)] == [11, 60]
    for step in (10, 2, 1):
        (tmp_path / f"checkpoint-{step}").mkdir()
    trainer.args.save_total_limit = 1
    trainer._rotate_checkpoints()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-10"]


def train_losses(folder: Path, cls: type[Trainer]) -> list[float]:
    trainer = make_trainer(folder, cls)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_overrides_without_num_items_in_batch_train_equally(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="Old.training_step without num_items_in_batch") as record:

        class Old(Trainer):
            def training_step(self, model: Any, inputs: Any) -> Any:  # type: ignore[override]
                return super().training_step(model, inputs)

            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
                outputs = model(**inputs)
                return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    assert any("Old.compute_loss without num_items_in_batch" in str(warning.message) for warning in record)
    assert train_losses(tmp_path / "old", Old) == train_losses(tmp_path / "new", Trainer)


def test_methods_accept_the_parameters_of_transformers_4() -> None:
    for name, (required, optional) in PARAMETERS.items():
        signature, static = inspect.signature(getattr(Trainer, name)), inspect.getattr_static(Trainer, name)
        receiver = () if isinstance(static, staticmethod) else (None,)
        names = [*required.split(), *optional.split()]
        arguments = signature.bind(*receiver, *names).arguments
        assert [arguments[parameter] for parameter in names] == names, name
        signature.bind(*receiver, **dict.fromkeys(names))
        signature.bind(*receiver, *required.split())
    for name, required in SHORTER.items():
        inspect.signature(getattr(Trainer, name)).bind(None, *required.split())


def test_overrides_can_call_methods_as_in_transformers_4(tmp_path: Path) -> None:
    class Old(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:
            super()._save_checkpoint(model, trial, metrics)

        def get_batch_samples(self, epoch_iterator: Any, num_batches: int) -> Any:  # type: ignore[override]
            return super().get_batch_samples(epoch_iterator, num_batches)

        def _maybe_log_save_evaluate(self, tr_loss, grad_norm, model, trial, epoch, ignore):  # type: ignore
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, epoch, ignore)

        def set_initial_training_values(self, args: Any, dataloader: Any, total_train_batch_size: int) -> Any:  # type: ignore[override]
            return super().set_initial_training_values(args, dataloader, 10 * total_train_batch_size)

    results = []
    for number, kind in enumerate((Old, Trainer)):
        trainer = make_trainer(tmp_path / str(number), kind)
        trainer.args.save_strategy, trainer.args.save_steps = "steps", 2
        result = trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        results.append((logged, sorted(path.name for path in (tmp_path / str(number)).glob("checkpoint-*"))))
        assert result.metrics["train_samples_per_second"] > 0
    assert results[0] == results[1] and results[0][1] == ["checkpoint-2", "checkpoint-3"]
    trainer.args.metric_for_best_model, trainer.args.greater_is_better = "loss", False
    trainer._save_checkpoint(trainer.model, None, {"eval_loss": 0.5})
    assert trainer.state.best_metric == 0.5 and trainer.state.best_model_checkpoint.endswith("checkpoint-3")
