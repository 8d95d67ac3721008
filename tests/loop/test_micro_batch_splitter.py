"""What `auto_micro_batch` does when memory runs out in a window."""

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
from littrainer.loop.micro_batch_splitter import _average
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
    """Calls a function in the backward pass, and holds it until what was computed is let go of."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, called: Callable[[], None]) -> torch.Tensor:
        ctx.called = called
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.called()
        return gradient, None


class Room(VectorClassifier):
    """Holds so many rows at once in backward passes, and adds up in a buffer what rows it has seen."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.register_buffer("seen", torch.zeros(()))
        self.sizes: list[int] = []
        self.held: list[weakref.ref[Any]] = []

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().logits(x)
        assert all(one() is None for one in self.held), "what was computed before is still there"
        self.sizes.append(len(x))
        self.seen += len(x)

        def run_out() -> None:
            if len(x) > self.room:
                raise torch.cuda.OutOfMemoryError(OUT_OF_MEMORY)

        self.held = [weakref.ref(run_out)]
        return Backward.apply(super().logits(x), run_out)


def run_out(folder: Path, model: Any, **changes: Any) -> Trainer:
    steps = {"max_steps": 3, "logging_strategy": "steps", "logging_steps": 1}
    trainer = quiet_trainer(
        folder, model, rows=40, auto_micro_batch=True, **{**steps, "per_device_train_batch_size": 5, **changes}
    )
    trainer.train()
    return trainer


def test_the_size_found_is_kept_and_told_once_and_buffers_and_generators_are_put_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draws = []
    for room in (2, 5):
        with caplog.at_level(logging.WARNING):
            trainer = run_out(tmp_path, Room(room), gradient_accumulation_steps=2)
        assert trainer.model.seen == 30
        draws.append(trainer.model.sizes)
    # Five, three, two: a window is done from its beginning, and later ones in parts at once.
    assert draws == [[5, 3, *[2, 2, 1] * 6], [5] * 6]
    (told,) = [one.getMessage() for one in caplog.records if "auto_micro_batch" in one.getMessage()]
    assert "in optimizer step 1," in told and "2 of 5 rows with 6 elements each fit" in told


def test_a_buffer_that_forward_resizes_gets_its_former_shape_back(tmp_path: Path) -> None:
    class Growing(Room):
        def __init__(self, room: int) -> None:
            super().__init__(room)
            self.register_buffer("rows_seen", torch.zeros(0))

        def logits(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.rows_seen.resize_(len(self.rows_seen) + len(x))[-len(x) :] = 1
            return super().logits(x)

    assert run_out(tmp_path, Growing(2)).model.rows_seen.tolist() == [1] * 15


def test_random_streams_go_on_as_if_memory_had_not_run_out(tmp_path: Path) -> None:
    class Dropping(Room):
        def logits(self, x: torch.Tensor) -> torch.Tensor:
            # As many numbers for a row, however rows are split.
            return super().logits(x + torch.stack([torch.rand(1) * self.training for _ in x]))

    found = []
    for room in (2, 5):
        torch.manual_seed(0)
        trainer = run_out(tmp_path, Dropping(room), gradient_accumulation_steps=2)
        found.append({**seen_of(trainer), "next": torch.rand(1)})
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_shorter_windows_take_as_many_rows_as_have_the_elements_that_fit(tmp_path: Path) -> None:
    sizes: list[tuple[int, int]] = []

    def note(model: Any, _: Any, inputs: dict[str, Any]) -> None:
        rows, length = inputs["input_ids"].shape
        if model.training:
            sizes.append((rows, length))
        if model.training and rows * length > 20:
            raise RuntimeError(OUT_OF_MEMORY)

    model = tiny_bert_classifier()
    model.register_forward_pre_hook(note, with_kwargs=True)
    lengths = [10] * 4 + [5] * 4 + [12] * 4
    rows = [{"input_ids": [7] * length, "labels": place % 3} for place, length in enumerate(lengths)]
    given = {"train_dataset": Rows(rows), "data_collator": pad_tokens}
    arguments = {"auto_micro_batch": True, "max_steps": 3, "train_sampling_strategy": "sequential"}
    trainer = quiet_trainer(tmp_path, model, given=given, **arguments)
    trainer.train()
    assert [size for size in sizes if size[0] * size[1] > 20] == [(4, 10)]
    assert sizes[-8:] == [(4, 10), (2, 10), (2, 10), (4, 5), *[(1, 12)] * 4]


def test_a_resumed_training_begins_with_the_size_that_was_found(tmp_path: Path) -> None:
    run_out(tmp_path, Room(2), save_strategy="steps", save_steps=2)
    model = Room(2)
    trainer = quiet_trainer(tmp_path, model, rows=40, auto_micro_batch=True, max_steps=3, per_device_train_batch_size=5)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert model.sizes == [2, 2, 1]


def test_one_row_that_does_not_fit_is_an_error_of_the_same_kind_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        torch.cuda.OutOfMemoryError, match=r"auto_micro_batch: .* even with 1 row\(s\) of 6 elements.*CUDA out"
    ):
        run_out(tmp_path, Room(0))


def test_rows_that_do_not_fit_without_gradients_either_are_tried_in_smaller_numbers(tmp_path: Path) -> None:
    class Small(Room):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            if len(x) > self.room:
                raise torch.cuda.OutOfMemoryError(OUT_OF_MEMORY)
            return super().forward(x, labels)

    trainer = run_out(tmp_path, Small(2), max_steps=1)
    assert trainer.model.sizes == [2, 2, 1]


def test_another_error_is_not_tried_again(tmp_path: Path) -> None:
    class Broken(Room):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            outputs = super().forward(x, labels)
            if self.training:
                raise RuntimeError("something else")
            return outputs

    model = Broken(9)
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


def with_beginnings(samples: list[Any]) -> dict[str, torch.Tensor]:
    collator = PackedCollator(lambda rows: {"input_ids": torch.tensor([rows[0]["input_ids"]])}, 64, 0, flattens=True)
    return collator([[sample] for sample in samples])


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (Contrastive, {}, "Contrastive: its loss is neither a sum nor a mean"),
        (PartlyDivided, {}, "PartlyDivided: its loss is neither a sum nor a mean"),
        (Weighted, {}, "Weighted: its loss is neither a sum nor a mean"),
        (OnlyTrains, {}, r"could not be tried before the first step \(ZeroDivisionError"),
        (VectorClassifier, {"kind": StepwiseTrainer}, "an overridden training_step"),
        (VectorClassifier, {"given": {"lightning": {"strategy": "auto"}}}, "a strategy in lightning="),
        (
            tiny_bert_classifier,
            {"given": {"train_dataset": Rows(token_rows(8)), "data_collator": with_beginnings}},
            "entries of unequal length",
        ),
    ],
    ids=["contrastive", "partly divided", "weighted", "only trains", "training_step", "strategy", "unequal entries"],
)
def test_what_cannot_be_split_is_refused_before_the_first_step(
    tmp_path: Path, model: Callable[[], Any], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=rf"auto_micro_batch .*{words}"):
        quiet_trainer(tmp_path, model(), auto_micro_batch=True, max_steps=1, **given).train()


@pytest.mark.parametrize("bf16", [False, True])
def test_without_a_failure_numbers_are_the_same_bit_for_bit(tmp_path: Path, bf16: bool) -> None:
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        given = {"train_dataset": Rows(tag_rows(24)), "data_collator": pad_tokens}
        changes = {"gradient_accumulation_steps": 2, "max_steps": 3, "bf16": bf16}
        trainer = quiet_trainer(tmp_path, tiny_bert_tagger(), given=given, auto_micro_batch=on, **changes)
        trainer.train()
        found.append(seen_of(trainer))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_nothing_is_split_before_a_loss_has_shown_how_its_parts_add_up(tmp_path: Path) -> None:
    class Late(Room):
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
        # The memory of another process, which has the same values in order.
        assert gradient.is_contiguous()
        gradient.mul_(2)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr("littrainer.loop.micro_batch_splitter.dist.all_reduce", all_reduce)
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.arange(6.0).reshape(3, 2).t()
    expected = parameter.grad.clone()
    _average([parameter], 2)
    assert torch.equal(parameter.grad, expected)
