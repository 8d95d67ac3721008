from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from torch import nn

from littrainer import Trainer, TrainerCallback, TrainingArguments
from littrainer.arguments import process
from littrainer.data.collators import RemoveColumnsCollator
from tests.distributed.launchers import fake_gpus, set_only
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, token_rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

# ---- Construction -------------------------------------------------------------------------------------------------


def test_a_trainer_without_arguments_trains_into_tmp_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(VectorClassifier())
    assert isinstance(trainer.args, TrainingArguments) and trainer.args.output_dir == "tmp_trainer"
    assert (tmp_path / "tmp_trainer").is_dir()


class Counting(TrainerCallback):
    steps = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1


SGD: Any = torch.optim.SGD([torch.zeros(1)])
SHORT_AND_LONG = {"long": Rows(vector_rows(4)), "short": Rows([])}


# Further messages are in tests/runtime/test_page.py.
@pytest.mark.parametrize(
    ("keywords", "changes", "error", "message"),
    [
        ({"train_dataset": None}, {}, ValueError, "train_dataset"),
        ({"eval_dataset": Rows([])}, {"eval_strategy": "epoch"}, ValueError, "eval_dataset.*empty"),
        ({"eval_dataset": SHORT_AND_LONG}, {"eval_strategy": "epoch"}, ValueError, "eval_dataset.*empty"),
        ({"model": None}, {}, RuntimeError, "model.*model_init"),
        ({"model_init": VectorClassifier}, {}, ValueError, "model.*model_init"),
        ({"model": None, "model_init": lambda first, second: None}, {}, RuntimeError, "model_init.*takes 2"),
        ({"model": None, "model_init": lambda: None}, {}, RuntimeError, "model_init.*returned None"),
        (
            {"model": None, "model_init": lambda: VectorClassifier(), "optimizers": (SGD, None)},
            {},
            RuntimeError,
            "model_init.*optimizers",
        ),
        (
            {"optimizers": (SGD, None), "optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
            {},
            RuntimeError,
            "optimizers.*optimizer_cls_and_kwargs",
        ),
        ({"data_collator": "no function"}, {}, TypeError, "data_collator.*callable.*str"),
        # The function lacks the parameter for the last batch.
        (
            {"compute_metrics": lambda prediction: {}},
            {"batch_eval_metrics": True},
            ValueError,
            "batch_eval_metrics.*compute_result",
        ),
    ],
)
def test_wrong_input_raises_a_single_line_before_the_first_step(
    tmp_path: Path, keywords: dict[str, Any], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    counting = Counting()
    keywords = {"model": VectorClassifier(), "train_dataset": Rows(vector_rows(8)), **keywords}
    with pytest.raises(error, match=message) as caught:
        Trainer(args=quiet_arguments(tmp_path, max_steps=2, **changes), callbacks=[counting], **keywords).train()
    assert "\n" not in str(caught.value) and counting.steps == 0


def test_evaluating_without_an_evaluation_set_says_which_argument_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*eval_dataset[^\n]*$"):
        quiet_trainer(tmp_path, trainer_kwargs={"eval_dataset": None}).evaluate()


@pytest.mark.parametrize(
    "device_map",
    [{"": "cpu"}, {"inner": "cpu", "head": "disk"}, {"inner": 0, "head": 1}, {"inner": "cuda:1", "head": "cuda:1"}],
)
def test_a_model_with_a_device_map_is_placed_as_by_transformers_and_not_moved_off_several_devices(
    tmp_path: Path, device_map: dict[str, Any]
) -> None:
    facts = []
    for kind, arguments in (
        (transformers.Trainer, transformers.TrainingArguments),
        (Trainer, TrainingArguments),
    ):
        model: Any = VectorClassifier()
        model.hf_device_map = device_map
        args = quiet_arguments(tmp_path, arguments, max_steps=1)
        trainer = kind(model, args, train_dataset=Rows(vector_rows(4)), eval_dataset=Rows(vector_rows(4)))
        facts.append((trainer.is_model_parallel, trainer.place_model_on_device, args.n_gpu, args.parallel_mode.value))
    assert facts[0] == facts[1]
    moves: list[Any] = []
    model.to = lambda *args, **keywords: moves.append((args, keywords))
    trainer.evaluate()
    trainer.train()
    trainer.predict(trainer.eval_dataset)
    trainer.accelerator.prepare_model(model)
    assert bool(moves) is (len(device_map) == 1)


def test_a_script_under_plain_python_logs_once_how_to_train_on_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Unplaced(TrainingArguments):
        place_model_on_device = False

    set_only(monkeypatch)
    fake_gpus(monkeypatch, 4)
    process._warn_of_idle_gpus.cache_clear()
    sharded: Any = VectorClassifier()
    sharded.hf_device_map = {"inner": 0, "head": 1}

    def construct(model: Any, **variables: str) -> str:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        caplog.clear()
        Trainer(model, quiet_arguments(tmp_path, Unplaced, use_cpu=False))
        return caplog.text

    assert construct(sharded) == construct(VectorClassifier(), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1") == ""
    set_only(monkeypatch)
    log = construct(VectorClassifier())
    assert "trains on one of 4 GPUs" in log and "`littrainer run SCRIPT` trains on all of them" in log
    assert construct(VectorClassifier()) == ""


# ---- Data ---------------------------------------------------------------------------------------------------------


def test_columns_the_model_does_not_take_are_removed_from_a_table(tmp_path: Path) -> None:
    table = Dataset.from_list([{**row, "text": "a"} for row in token_rows(4)])
    trainer = quiet_trainer(
        tmp_path, tiny_bert_classifier(), trainer_kwargs={"train_dataset": table, "data_collator": pad_tokens}
    )
    loader = trainer.get_train_dataloader()
    assert loader.dataset.column_names == ["input_ids", "labels"] and loader.collate_fn is pad_tokens
    # Other datasets are trimmed sample by sample.
    collator = quiet_trainer(tmp_path).get_train_dataloader().collate_fn
    assert isinstance(collator, RemoveColumnsCollator)
    assert {"x", "labels", "label", "label_ids"} == set(collator.signature_columns)
    trainer.args.remove_unused_columns = False
    assert "text" in trainer.get_train_dataloader().dataset.column_names


def test_the_error_of_a_batch_without_input_names_the_columns_of_the_model(tmp_path: Path) -> None:
    class NoLabels(VectorClassifier):
        def forward(self, x: Any = None) -> Any: ...

    rows = Rows([{"text": "a"}, {"text": "b"}])
    trainer = quiet_trainer(tmp_path, NoLabels(), trainer_kwargs={"train_dataset": rows}, max_steps=1)
    with pytest.raises(ValueError, match=r"NoLabels\.forward takes \(x.*remove_unused_columns=False"):
        trainer.train()


def test_nested_inputs_keep_their_structure_when_they_are_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = quiet_trainer(tmp_path)
    monkeypatch.setattr(TrainingArguments, "device", property(lambda _: torch.device("meta")))
    inputs = {"a": torch.ones(1), "b": (torch.ones(1), ["text", {"c": torch.ones(1)}]), "d": 3}
    moved = trainer._prepare_input(inputs)
    assert moved["a"].is_meta and moved["b"][0].is_meta and moved["b"][1][1]["c"].is_meta
    assert moved["b"][1][0] == "text" and moved["d"] == 3 and type(moved["b"]) is tuple
    encoding = transformers.BatchEncoding({"input_ids": torch.ones(1)})
    assert type(trainer._prepare_input(encoding)) is transformers.BatchEncoding


# ---- Optimizer and schedule ---------------------------------------------------------------------------------------


def test_an_existing_optimizer_is_not_replaced(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=2)
    optimizer = trainer.create_optimizer()
    assert trainer.create_optimizer() is optimizer
    trainer.train()
    assert trainer.optimizer is optimizer


def test_a_passed_schedule_continues_and_a_created_schedule_restarts(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=2)
    trainer.train()
    first = trainer.lr_scheduler
    trainer.train()
    assert trainer.lr_scheduler is not first

    model = VectorClassifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    passed = quiet_trainer(tmp_path, model, trainer_kwargs={"optimizers": (optimizer, schedule)}, max_steps=2)
    passed.train()
    passed.train()
    assert passed.lr_scheduler is schedule and schedule.last_epoch == 4


def test_learning_rates_and_groups_are_those_of_the_optimizer(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, weight_decay=0.1)
    for method in (trainer.get_learning_rates, trainer.get_optimizer_group):
        with pytest.raises(ValueError, match=r"no optimizer yet.*create_optimizer"):
            method()
    trainer.create_optimizer()
    assert trainer.get_learning_rates() == [0.01, 0.01]
    assert trainer.get_num_trainable_parameters() == sum(weight.numel() for weight in trainer.model.parameters())
    assert trainer.get_optimizer_group(trainer.model.head.weight)["weight_decay"] == 0.1
    assert [len(group) for group in trainer.get_optimizer_group()] == [2, 4]
    assert trainer.get_optimizer_group(nn.Parameter(torch.zeros(1))) is None


def test_a_replicated_model_has_tensor_parallel_size_1(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, VectorClassifier())
    assert trainer.get_tp_size() == 1
    # Models of transformers have this attribute.
    trainer.model._tp_size = 2
    assert trainer.get_tp_size() == 2


# ---- Training, logging, operations --------------------------------------------------------------------------------


def test_operations_are_those_that_transformers_counts(tmp_path: Path) -> None:
    model = tiny_bert_classifier()
    inputs = pad_tokens(token_rows(3))
    ours = quiet_trainer(tmp_path, model)
    theirs = transformers.Trainer(model=model, args=quiet_arguments(tmp_path, transformers.TrainingArguments))
    assert ours.floating_point_ops(dict(inputs)) == theirs.floating_point_ops(dict(inputs)) > 0
    assert ours.floating_point_ops({"labels": inputs["labels"]}) == 0
    assert quiet_trainer(tmp_path).floating_point_ops({"x": torch.ones(1)}) == 0
