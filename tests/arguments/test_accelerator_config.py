from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from transformers.trainer_pt_utils import AcceleratorConfig as TransformersConfig

from littrainer.arguments import TrainingArguments
from littrainer.arguments.accelerator_config import AcceleratorConfig, normalize_accelerator_config


def test_the_entries_are_those_of_transformers_and_come_from_a_file_or_from_its_object(tmp_path: Path) -> None:
    assert TrainingArguments().accelerator_config.to_dict() == TransformersConfig().to_dict()  # type: ignore[union-attr]
    path = tmp_path / "accelerator.json"
    path.write_text(json.dumps({"use_seedable_sampler": False}))
    forms: list[Any] = [str(path), path, TransformersConfig(use_seedable_sampler=False)]
    for given in forms:
        args = TrainingArguments(accelerator_config=given)
        assert args.accelerator_config == AcceleratorConfig(use_seedable_sampler=False)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"even_batch": True}, ValueError, "'even_batch' .did you mean 'even_batches'"),
        ({"gradient_accumulation_kwargs": {"num_step": 2}}, ValueError, "num_step.*num_steps"),
        (3, TypeError, "accelerator_config=3 is not usable"),
    ],
    ids=str,
)
def test_what_is_no_config_is_refused(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        TrainingArguments(accelerator_config=given)


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
def test_a_file_that_holds_no_config_is_refused_in_one_sentence(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / "accelerator.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as caught:
        TrainingArguments(accelerator_config=str(path))
    assert "\n" not in str(caught.value)


def test_the_accumulation_asked_of_the_accelerator_counts_where_the_argument_is_1() -> None:
    args = TrainingArguments(accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 4}})
    for _ in range(2):
        # Twice, since one script may make several Trainers of the same arguments.
        normalize_accelerator_config(args)
        assert args.gradient_accumulation_steps == 4


@pytest.mark.parametrize(("pinned", "messages"), [(True, 0), (False, 1)])
def test_copies_that_do_not_block_need_pinned_memory_and_that_is_told(
    pinned: bool, messages: int, caplog: pytest.LogCaptureFixture
) -> None:
    normalize_accelerator_config(
        TrainingArguments(accelerator_config={"non_blocking": True}, dataloader_pin_memory=pinned)
    )
    told = [record for record in caplog.records if "dataloader_pin_memory=True" in record.getMessage()]
    assert len(told) == messages


def test_a_state_that_the_script_configured_says_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
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
