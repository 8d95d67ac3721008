from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from littrainer.training.tokens import InputTokenCounter
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, token_rows
from tests.scenarios.models import tiny_bert_classifier
from tests.scenarios.trainers import quiet_trainer

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 0], [7, 0, 0]])


def counted(wanted: str, inputs: Any, *, name: str | None = None, pad: int | None = None) -> int:
    model = SimpleNamespace() if name is None else SimpleNamespace(main_input_name=name)
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(include_num_input_tokens_seen=wanted, device=CPU),
        model=model,
        processing_class=None if pad is None else SimpleNamespace(pad_token_id=pad),
        get_tp_size=lambda: 1,
    )
    return InputTokenCounter().count(trainer, inputs)


@pytest.mark.parametrize(
    ("wanted", "inputs", "options", "expected"),
    [
        ("no", {"input_ids": IDS}, {}, 0),
        ("all", {"input_ids": IDS}, {}, 6),
        ("all", {"pixels": torch.ones(4)}, {"name": "pixels"}, 4),
        ("non_padding", {"input_ids": IDS, "attention_mask": (IDS > 0).long()}, {}, 3),
        ("non_padding", {"input_ids": IDS}, {"pad": 0}, 3),
        ("non_padding", {"input_ids": IDS, "attention_mask": torch.ones(2, 3)}, {"pad": 0}, 6),
        ("non_padding", {"input_ids": IDS}, {}, 6),
        ("all", {"x": IDS}, {}, 0),
    ],
)
def test_tokens_are_counted_as_asked(wanted: str, inputs: Any, options: Any, expected: int) -> None:
    assert counted(wanted, inputs, **options) == expected


def test_what_cannot_be_counted_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    counter = InputTokenCounter()
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(include_num_input_tokens_seen="non_padding", device=CPU),
        model=None,
        processing_class=None,
        get_tp_size=lambda: 1,
    )
    for _ in range(3):
        counter.count(trainer, {"x": IDS})
        counter.count(trainer, {"input_ids": IDS})
    first, second = caplog.messages
    assert "'input_ids'" in first and "pad_token_id" in second


def test_tokens_are_logged_with_their_speed_and_kept_over_a_resume(tmp_path: Path) -> None:
    rows = token_rows(8, shortest=4, longest=4)

    def trainer() -> Any:
        return quiet_trainer(
            tmp_path,
            tiny_bert_classifier(),
            given={"train_dataset": Rows(rows), "data_collator": pad_tokens},
            include_num_input_tokens_seen="all",
            max_steps=4,
            logging_strategy="steps",
            logging_steps=1,
            save_strategy="steps",
            save_steps=2,
        )

    first = trainer()
    first.train()
    logs = first.state.log_history
    assert [log["num_input_tokens_seen"] for log in logs] == [16, 32, 48, 64, 64]
    assert all(log["train_tokens_per_second"] > 0 for log in logs[:4])
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [log["num_input_tokens_seen"] for log in resumed.state.log_history] == [16, 32, 48, 64, 64]
