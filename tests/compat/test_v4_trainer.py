"""What a script for transformers 4 does with a Trainer."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import Trainer, TrainingArguments
from littrainer.compat.v4_trainer import accepts_earlier_keywords
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier


class Tokenizer:
    """Stands for a tokenizer, of which only the identity counts here."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.txt").write_text("saved", encoding="utf-8")


def a_trainer(folder: Path, cls: type[Trainer] = Trainer, **keywords: Any) -> Any:
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=3,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_accumulation_steps=2,
    )
    rows = Rows(vector_rows(12))
    torch.manual_seed(0)
    keywords.setdefault("data_collator", None)
    return cls(model=VectorClassifier(), args=args, train_dataset=rows, eval_dataset=rows, **keywords)


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


def test_a_model_path_is_taken_for_the_checkpoint_to_resume_from(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    with (
        pytest.warns(FutureWarning, match="write resume_from_checkpoint"),
        pytest.raises(ValueError, match="not-there"),
    ):
        trainer.train(model_path=str(tmp_path / "not-there"))


def test_the_prediction_loop_is_the_evaluation_loop(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    loader = trainer.get_eval_dataloader()
    with pytest.warns(FutureWarning, match="evaluation_loop"):
        old = trainer.prediction_loop(loader, "Evaluation", metric_key_prefix="old")
    new = trainer.evaluation_loop(loader, "Evaluation")
    assert old.metrics["old_loss"] == new.metrics["eval_loss"]
    assert (old.predictions == new.predictions).all()


def test_the_first_process_answers_under_its_earlier_name(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    with pytest.warns(FutureWarning, match="is_world_process_zero"):
        assert trainer.is_world_master() is True
    with pytest.warns(FutureWarning, match="is_local_process_zero"):
        assert trainer.is_local_master() is True


def test_tokens_of_a_loader_are_counted() -> None:
    batches = [{"input_ids": torch.zeros(2, 3)}, {"input_ids": torch.zeros(1, 5)}]
    assert Trainer.num_tokens(batches) == 11
    assert Trainer.num_tokens(batches, max_steps=10) == 60
    assert Trainer.num_tokens([{"pixels": torch.zeros(1)}]) == 0


def test_checkpoints_are_sorted_and_rotated_through_the_trainer(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
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


def test_a_compute_loss_without_the_windows_size_trains_as_one_with_it(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="Old.compute_loss without num_items_in_batch"):

        class Old(Trainer):
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
                outputs = model(**inputs)
                return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    assert losses_with(tmp_path / "old", Old) == losses_with(tmp_path / "new", Trainer)


class LossOfWholeWindow(VectorClassifier):
    """Divides its loss by the window's labels, which a Trainer that hands no number on must not count on."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **_: Any) -> Any:
        logits = self.logits(x)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch, "logits": logits}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_compute_loss_without_the_windows_size_returns_means_whatever_the_model_could_divide_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
            return model(**inputs)["loss"]

    expected = losses_with(tmp_path / "new", Trainer)
    monkeypatch.setattr(f"{__name__}.VectorClassifier", LossOfWholeWindow)
    assert losses_with(tmp_path / "old", Old) == expected


def test_a_training_step_without_the_windows_size_trains_as_one_with_it(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="Old.training_step without num_items_in_batch"):

        class Old(Trainer):
            def training_step(self, model: Any, inputs: Any) -> Any:  # type: ignore[override]
                return super().training_step(model, inputs)

    assert losses_with(tmp_path / "old", Old) == losses_with(tmp_path / "new", Trainer)


def test_overrides_with_todays_parameters_or_with_any_are_left_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class New(Trainer):
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
                return super().compute_loss(model, inputs, return_outputs, **kwargs)

            def training_step(self, *values: Any, **keywords: Any) -> Any:
                return super().training_step(*values, **keywords)

    assert New.loss_is_scaled_for_ga is Trainer.loss_is_scaled_for_ga


def test_signatures_show_todays_names() -> None:
    assert "tokenizer" not in inspect.signature(Trainer).parameters
    assert list(inspect.signature(Trainer.train).parameters)[1] == "resume_from_checkpoint"


def test_a_keyword_under_its_earlier_name_is_handed_on_under_todays() -> None:
    @accepts_earlier_keywords(old="new")
    def echo(new: int = 0) -> int:
        return new

    with pytest.warns(FutureWarning, match=r"echo\(old=\.\.\.\) is an earlier spelling: write new"):
        assert echo(old=3) == 3  # type: ignore[call-arg]
    assert echo(new=4) == 4


def test_values_are_gathered_as_arrays(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    assert trainer._gather_and_numpify(None, "nothing") is None
    assert trainer._gather_and_numpify((torch.ones(2),), "ones")[0].tolist() == [1.0, 1.0]


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
