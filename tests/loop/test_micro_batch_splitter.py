"""`auto_micro_batch` in windows that run out of memory."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from littrainer import Trainer
from littrainer.data.packing import PackedCollator
from littrainer.loop.micro_batch_splitter import _all_reduce_gradients
from tests.faults.memory import OUT_OF_MEMORY, Fault, seen_of, trained
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, tag_rows, token_rows
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_bert_tagger
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer


@pytest.mark.parametrize(
    "fault",
    [
        Fault("mean", "forward", step=1, accumulation=1),
        Fault("mean", "backward", step=3, accumulation=4, position=3, times=2),
        Fault("divided", "backward", step=2, accumulation=4, position=1),
        Fault("tags", "forward", step=4, accumulation=4, position=2),
        Fault("exact tags", "backward", step=2, accumulation=1, times=2),
        Fault("own loss", "forward", step=3, accumulation=4, position=0),
        Fault("mean", "backward", step=2, accumulation=4, position=2, by_lightning=True),
    ],
    ids=lambda fault: f"{fault.head}, {fault.place}",
)
def test_no_step_is_lost_and_weights_are_those_of_a_training_that_did_not_run_out(tmp_path: Path, fault: Fault) -> None:
    trainer = trained(tmp_path, fault, is_faulty=True)
    assert trainer.model.times_left == 0
    torch.testing.assert_close(
        seen_of(trainer), seen_of(trained(tmp_path, fault, is_faulty=False)), rtol=1e-5, atol=1e-6
    )


class Backward(torch.autograd.Function):
    """An operation that calls a function in the backward pass and refers to it while the graph exists."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.function()
        return gradient, None


class SmallMemory(VectorClassifier):
    """A model with memory for `room` rows in backward passes that counts rows in a buffer."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.register_buffer("seen", torch.zeros(()))
        self.sizes: list[int] = []
        self.references: list[weakref.ref[Any]] = []

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().logits(x)
        assert all(reference() is None for reference in self.references), "the failed graph is not freed"
        self.sizes.append(len(x))
        self.seen += len(x)

        def run_out() -> None:
            if len(x) > self.room:
                raise torch.cuda.OutOfMemoryError(OUT_OF_MEMORY)

        self.references = [weakref.ref(run_out)]
        return Backward.apply(super().logits(x), run_out)


def run_out(folder: Path, model: Any, **changes: Any) -> Trainer:
    steps = {"max_steps": 3, "logging_strategy": "steps", "logging_steps": 1}
    trainer = quiet_trainer(
        folder, model, rows=40, auto_micro_batch=True, **{**steps, "per_device_train_batch_size": 5, **changes}
    )
    trainer.train()
    return trainer


def test_a_smaller_size_is_used_from_then_on_with_a_single_warning_and_restored_buffers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draws = []
    for room in (2, 5):
        with caplog.at_level(logging.WARNING):
            trainer = run_out(tmp_path, SmallMemory(room), gradient_accumulation_steps=2)
        assert trainer.model.seen == 30
        draws.append(trainer.model.sizes)
    # The first window is rerun with five, three and two rows; later windows are split at once.
    assert draws == [[5, 3, *[2, 2, 1] * 6], [5] * 6]
    messages = [record.getMessage() for record in caplog.records]
    (message,) = [text for text in messages if "auto_micro_batch" in text]
    assert "in optimizer step 1," in message and "Micro-batches of 2 instead of 5 rows (6 elements each) fit" in message


def test_a_rerun_does_not_change_random_streams(tmp_path: Path) -> None:
    class Dropping(SmallMemory):
        def logits(self, x: torch.Tensor) -> torch.Tensor:
            # Draws for each row, independent of the split.
            return super().logits(x + torch.stack([torch.rand(1) * self.training for _ in x]))

    outcomes = []
    for room in (2, 5):
        torch.manual_seed(0)
        trainer = run_out(tmp_path, Dropping(room), gradient_accumulation_steps=2)
        outcomes.append({**seen_of(trainer), "next": torch.rand(1)})
    torch.testing.assert_close(*outcomes, rtol=1e-5, atol=1e-6)


def test_the_number_of_rows_depends_on_their_length(tmp_path: Path) -> None:
    sizes: list[tuple[int, int]] = []

    def record(model: Any, _: Any, inputs: dict[str, Any]) -> None:
        rows, length = inputs["input_ids"].shape
        if model.training:
            sizes.append((rows, length))
        if model.training and rows * length > 20:
            raise RuntimeError(OUT_OF_MEMORY)

    model = tiny_bert_classifier()
    model.register_forward_pre_hook(record, with_kwargs=True)
    lengths = [10] * 4 + [5] * 4 + [12] * 4
    rows = [{"input_ids": [7] * length, "labels": index % 3} for index, length in enumerate(lengths)]
    parameters = {"train_dataset": Rows(rows), "data_collator": pad_tokens}
    arguments = {"auto_micro_batch": True, "max_steps": 3, "train_sampling_strategy": "sequential"}
    trainer = quiet_trainer(tmp_path, model, trainer_kwargs=parameters, **arguments)
    trainer.train()
    assert [size for size in sizes if size[0] * size[1] > 20] == [(4, 10)]
    assert sizes[-8:] == [(4, 10), (2, 10), (2, 10), (4, 5), *[(1, 12)] * 4]


def test_a_resumed_training_begins_with_the_smaller_size(tmp_path: Path) -> None:
    run_out(tmp_path, SmallMemory(2), save_strategy="steps", save_steps=2)
    model = SmallMemory(2)
    trainer = quiet_trainer(tmp_path, model, rows=40, auto_micro_batch=True, max_steps=3, per_device_train_batch_size=5)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert model.sizes == [2, 2, 1]


def test_a_single_row_that_does_not_fit_is_an_error_of_the_same_type(tmp_path: Path) -> None:
    with pytest.raises(
        torch.cuda.OutOfMemoryError, match=r"auto_micro_batch: .* even with 1 row\(s\) of 6 elements.*CUDA out"
    ):
        run_out(tmp_path, SmallMemory(0))


def test_the_probe_retries_with_fewer_rows(tmp_path: Path) -> None:
    class Small(SmallMemory):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            if len(x) > self.room:
                raise torch.cuda.OutOfMemoryError(OUT_OF_MEMORY)
            return super().forward(x, labels)

    trainer = run_out(tmp_path, Small(2), max_steps=1)
    assert trainer.model.sizes == [2, 2, 1]


def test_another_error_is_not_retried(tmp_path: Path) -> None:
    class Failing(SmallMemory):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            outputs = super().forward(x, labels)
            if self.training:
                raise RuntimeError("something else")
            return outputs

    model = Failing(9)
    with pytest.raises(RuntimeError, match="something else"):
        run_out(tmp_path, model)
    assert model.sizes == [5]


class Contrastive(VectorClassifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        vectors = self.logits(x)
        return nn.functional.cross_entropy(vectors @ vectors.T, torch.arange(len(x))), vectors


class Weighted(VectorClassifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return {"loss": nn.functional.cross_entropy(self.logits(x), labels, torch.tensor([1.0, 2.0, 3.0]))}


class PartlyDivided(VectorClassifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, num_items_in_batch: Any = 1) -> Any:
        summed = nn.functional.cross_entropy(self.logits(x), labels, reduction="sum")
        return {"loss": summed / num_items_in_batch + self.head.weight.square().sum()}

    accepts_loss_kwargs = True


class OnlyTrains(VectorClassifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return super().forward(x, labels) if self.training else 1 / 0


def collate_with_offsets(samples: list[Any]) -> dict[str, torch.Tensor]:
    collator = PackedCollator(lambda rows: {"input_ids": torch.tensor([rows[0]["input_ids"]])}, 64, 0, flattens=True)
    return collator([[sample] for sample in samples])


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (Contrastive, {}, "Contrastive: its loss is neither a sum nor a mean"),
        (PartlyDivided, {}, "PartlyDivided: its loss is neither a sum nor a mean"),
        (Weighted, {}, "Weighted: its loss is neither a sum nor a mean"),
        (OnlyTrains, {}, r"could not be tried before the first step \(ZeroDivisionError"),
        (VectorClassifier, {"kind": StepwiseTrainer}, "an overridden training_step"),
        (VectorClassifier, {"trainer_kwargs": {"lightning": {"strategy": "auto"}}}, "a strategy in lightning="),
        (
            tiny_bert_classifier,
            {"trainer_kwargs": {"train_dataset": Rows(token_rows(8)), "data_collator": collate_with_offsets}},
            "entries of unequal length",
        ),
    ],
    ids=["contrastive", "partly divided", "weighted", "only trains", "training_step", "strategy", "unequal entries"],
)
def test_a_loss_that_cannot_be_split_is_refused_before_the_first_step(
    tmp_path: Path, model: Callable[[], Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"auto_micro_batch .*{message}"):
        quiet_trainer(tmp_path, model(), auto_micro_batch=True, max_steps=1, **settings).train()


@pytest.mark.parametrize("bf16", [False, True])
def test_without_a_failure_numbers_are_the_same_bit_for_bit(tmp_path: Path, bf16: bool) -> None:
    outcomes = []
    for on in (False, True):
        torch.manual_seed(0)
        parameters = {"train_dataset": Rows(tag_rows(24)), "data_collator": pad_tokens}
        changes = {"gradient_accumulation_steps": 2, "max_steps": 3, "bf16": bf16}
        trainer = quiet_trainer(tmp_path, tiny_bert_tagger(), trainer_kwargs=parameters, auto_micro_batch=on, **changes)
        trainer.train()
        outcomes.append(seen_of(trainer))
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


def test_nothing_is_split_before_the_reduction_is_known(tmp_path: Path) -> None:
    class Late(SmallMemory):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            outputs = super().forward(x, labels)
            if not self.sizes:
                outputs["loss"] = outputs["loss"] * float("nan")
            return outputs

    model = Late(5)
    model.room = 5
    run_out(tmp_path, model, max_steps=1)
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"even with 5 row\(s\) of 6 elements, which cannot be split"):
        run_out(tmp_path, Late(4), max_steps=1)


def test_gradients_of_another_memory_layout_are_averaged_by_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(gradient: torch.Tensor, async_op: bool) -> Any:
        assert gradient.is_contiguous()
        gradient.mul_(2)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr("littrainer.loop.micro_batch_splitter.dist.all_reduce", all_reduce)
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.arange(6.0).reshape(3, 2).t()
    expected = parameter.grad.clone()
    _all_reduce_gradients([parameter], 2)
    assert torch.equal(parameter.grad, expected)


def test_the_shape_of_a_resized_buffer_is_restored(tmp_path: Path) -> None:
    class Growing(SmallMemory):
        def __init__(self, room: int) -> None:
            super().__init__(room)
            self.register_buffer("rows_seen", torch.zeros(0))

        def logits(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.rows_seen.resize_(len(self.rows_seen) + len(x))[-len(x) :] = 1
            return super().logits(x)

    assert run_out(tmp_path, Growing(2)).model.rows_seen.tolist() == [1] * 15
