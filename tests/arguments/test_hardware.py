from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from littrainer.arguments import TrainingArguments


@pytest.fixture
def precision_switch() -> Iterator[None]:
    """Puts torch's switch for TF32 back."""
    before = torch.backends.fp32_precision
    yield
    torch.backends.fp32_precision = before


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, generation: int | None, has_bf16: bool = True) -> None:
    """Let torch see an NVIDIA GPU of a generation (8 is Ampere), or none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: generation is not None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=generation))
    monkeypatch.setattr(torch.version, "cuda", None if generation is None else "12.8")


@pytest.mark.parametrize("name", ["bf16", "bf16_full_eval"])
def test_bfloat16_needs_a_gpu_that_has_it_or_the_wish_for_a_cpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for generation, has_bf16 in ((None, True), (7, False)):
        pretend_gpu(monkeypatch, generation, has_bf16)
        with pytest.raises(ValueError, match=rf"^{name}=True needs a GPU.*use_cpu=True"):
            TrainingArguments(**{name: True})
        TrainingArguments(**{name: True}, use_cpu=True)
    pretend_gpu(monkeypatch, 8)
    TrainingArguments(**{name: True})


@pytest.mark.parametrize("generation", [None, 7])
def test_tf32_needs_an_ampere_gpu(monkeypatch: pytest.MonkeyPatch, generation: int | None) -> None:
    pretend_gpu(monkeypatch, generation)
    with pytest.raises(ValueError, match="tf32=True needs an NVIDIA GPU"):
        TrainingArguments(tf32=True)


def test_forbidding_what_is_not_there_is_no_error(monkeypatch: pytest.MonkeyPatch, precision_switch: None) -> None:
    pretend_gpu(monkeypatch, None)
    before = torch.backends.fp32_precision
    TrainingArguments(tf32=False)
    assert torch.backends.fp32_precision == before


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"tf32": True}, "tf32"),
        ({"tf32": False}, "ieee"),
        ({}, "none"),
        ({"torch_compile_backend": "eager"}, "tf32"),
        ({"torch_compile_backend": "eager", "fp16": True}, "none"),
        ({"torch_compile_backend": "eager", "tf32": False}, "ieee"),
    ],
    ids=str,
)
def test_the_switch_for_tf32_is_set_as_asked_and_by_compilation(
    monkeypatch: pytest.MonkeyPatch, precision_switch: None, keywords: dict[str, Any], expected: str
) -> None:
    torch.backends.fp32_precision = "none"
    pretend_gpu(monkeypatch, 8)
    TrainingArguments(**keywords)
    assert torch.backends.fp32_precision == expected


def test_an_unknown_compiler_backend_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"torch_compile_backend='induktor'.*inductor"):
        TrainingArguments(torch_compile_backend="induktor")


def test_an_unknown_compiler_mode_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"torch_compile_mode='fast'.*max-autotune"):
        TrainingArguments(torch_compile_mode="fast")


@pytest.mark.parametrize("word", ["bf16", "fp16"])
def test_a_launchers_mixed_precision_counts_where_the_arguments_name_none(
    monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", word)
    pretend_gpu(monkeypatch, 8)
    assert TrainingArguments().mixed_precision == word
    assert TrainingArguments(bf16=True).mixed_precision == "bf16"
