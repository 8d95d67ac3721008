from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from transformers.trainer_pt_utils import AcceleratorConfig as TransformersConfig

from littrainer.arguments import TrainingArguments
from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.loop.checks import normalize_accelerator_config


def test_the_entries_equal_those_of_transformers_and_are_read_from_a_file_or_an_object(tmp_path: Path) -> None:
    assert TrainingArguments().accelerator_config.to_dict() == TransformersConfig().to_dict()  # type: ignore[union-attr]
    path = tmp_path / "accelerator.json"
    path.write_text(json.dumps({"use_seedable_sampler": False}))
    forms: list[Any] = [str(path), path, TransformersConfig(use_seedable_sampler=False)]
    for config in forms:
        args = TrainingArguments(accelerator_config=config)
        assert args.accelerator_config == AcceleratorConfig(use_seedable_sampler=False)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"even_batch": True}, ValueError, "'even_batch' .did you mean 'even_batches'"),
        ({"gradient_accumulation_kwargs": {"num_step": 2}}, ValueError, "num_step.*num_steps"),
        (3, TypeError, "accelerator_config=3 is not usable"),
    ],
    ids=str,
)
def test_an_invalid_config_raises(config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TrainingArguments(accelerator_config=config)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read: No such file"),
        (b"{", "not valid JSON"),
        (b"[1]", "JSON object"),
        (b"\xff", "UTF-8"),
        (b'{"even_batch": true}', "accelerator.json.*'even_batch'"),
    ],
)
def test_an_invalid_config_file_raises_a_single_line(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "accelerator.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as caught:
        TrainingArguments(accelerator_config=str(path))
    assert "\n" not in str(caught.value)


def test_num_steps_replaces_an_accumulation_of_1() -> None:
    args = TrainingArguments(accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 4}})
    for _ in range(2):
        # Twice, for several Trainers with the same arguments.
        normalize_accelerator_config(args)
        assert args.gradient_accumulation_steps == 4


@pytest.mark.parametrize(("pinned", "messages"), [(True, 0), (False, 1)])
def test_non_blocking_copies_without_pinned_memory_log_a_warning(
    pinned: bool, messages: int, caplog: pytest.LogCaptureFixture
) -> None:
    normalize_accelerator_config(
        TrainingArguments(accelerator_config={"non_blocking": True}, dataloader_pin_memory=pinned)
    )
    warnings = [record for record in caplog.records if "dataloader_pin_memory=True" in record.getMessage()]
    assert len(warnings) == messages


def test_a_configured_state_sets_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ValueError, match=r"use_configured_state=True.*before the arguments"):
        TrainingArguments(accelerator_config={"use_configured_state": True})
    PartialState(cpu=True)
    monkeypatch.setitem(PartialState._shared_state, "device", torch.device("meta"))
    try:
        configured = TrainingArguments(accelerator_config={"use_configured_state": True}, use_cpu=True)
        assert configured.device == torch.device("meta")
        assert TrainingArguments(use_cpu=True).device == torch.device("cpu")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
