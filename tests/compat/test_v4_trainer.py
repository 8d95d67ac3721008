"""What a script for transformers 4 does with a Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import Trainer
from tests.scenarios.models import tiny_bert_classifier
from tests.scenarios.trainers import quiet_trainer


class Tokenizer:
    """Stands for a tokenizer, of which only the identity counts here."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.txt").write_text("saved", encoding="utf-8")


def a_trainer(folder: Path, cls: type[Trainer] = Trainer, **keywords: Any) -> Any:
    steps = {"max_steps": 3, "gradient_accumulation_steps": 2, "logging_strategy": "steps", "logging_steps": 1}
    return quiet_trainer(folder, kind=cls, given={"data_collator": None, **keywords}, **steps)


def test_a_tokenizer_is_taken_for_the_processing_class(tmp_path: Path) -> None:
    tokenizer = Tokenizer()
    with pytest.warns(FutureWarning, match="write processing_class"):
        trainer = a_trainer(tmp_path, tokenizer=tokenizer, data_collator=torch.utils.data.default_collate)
    assert trainer.processing_class is tokenizer
    with pytest.warns(FutureWarning, match="trainer.processing_class"):
        assert trainer.tokenizer is tokenizer
    other = Tokenizer()
    with pytest.warns(FutureWarning, match="trainer.processing_class"):
        trainer.tokenizer = other
    assert trainer.processing_class is other
    with pytest.raises(TypeError, match="both tokenizer and processing_class"):
        Trainer(model=torch.nn.Linear(1, 1), tokenizer=tokenizer, processing_class=tokenizer)  # type: ignore[call-arg]


def test_a_subclass_may_keep_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    class WithOwnTokenizer(Trainer):
        def __init__(self, *values: Any, **keywords: Any) -> None:
            self.tokenizer = "its own"
            super().__init__(*values, **keywords)

    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        trainer = a_trainer(tmp_path, WithOwnTokenizer)
        assert (trainer.tokenizer, trainer.processing_class) == ("its own", None)


def test_earlier_names_mean_what_they_are_called_today(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    assert trainer._gather_and_numpify(None, "nothing") is None
    assert trainer._gather_and_numpify((torch.ones(2),), "ones")[0].tolist() == [1.0, 1.0]
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
    assert [Path(path).name for path in trainer._sorted_checkpoints()] == [f"checkpoint-{n}" for n in (1, 2, 10)]
    trainer.args.save_total_limit = 1
    trainer._rotate_checkpoints()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-10"]


def losses_with(folder: Path, cls: type[Trainer]) -> list[float]:
    trainer = a_trainer(folder, cls)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_overrides_without_the_windows_size_train_as_those_with_it(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="Old.training_step without num_items_in_batch") as told:

        class Old(Trainer):
            def training_step(self, model: Any, inputs: Any) -> Any:  # type: ignore[override]
                return super().training_step(model, inputs)

            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
                outputs = model(**inputs)
                return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    assert [str(one.message) for one in told if "Old.compute_loss without num_items_in_batch" in str(one.message)]
    assert losses_with(tmp_path / "old", Old) == losses_with(tmp_path / "new", Trainer)


def test_a_subclass_may_switch_the_noise_of_neftune_on_and_off(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    trainer.neftune_noise_alpha = 5.0
    trainer.model = model = tiny_bert_classifier()
    embeddings = model.get_input_embeddings()
    assert trainer._activate_neftune(model) is model
    ids = torch.ones(1, 3, dtype=torch.long)
    assert not torch.equal(embeddings(ids), embeddings.weight[ids])
    trainer._deactivate_neftune(model)
    assert torch.equal(embeddings(ids), embeddings.weight[ids])
