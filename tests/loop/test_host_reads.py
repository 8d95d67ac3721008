"""Between two logs there is no device sync."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from littrainer import Trainer, TrainerCallback
from tests.loop.step_calls import BATCH_SIZE, run_raw
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import tiny_bert_for_masked_tokens, tiny_gpt2
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

# Operators that wait for the device; `item()`, `float()` and `bool()` call the first.
READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "unique2", "_unique2"}
# Functions that wait, and have no operator on a CPU.
TENSOR_READS = {"tolist", "cpu"}
LOGGING_STEPS, STEPS = 5, 15


@pytest.fixture(autouse=True)
def _losses_are_read_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("littrainer.loop.loss.is_on_cpu", lambda loss: False)


class CountedReads(TorchDispatchMode):
    """Counts of operators that read a tensor's values on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.of_kind: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in READS:
            self.of_kind[name] += 1
        return function(*args, **(kwargs or {}))


class CountedCopies(TorchFunctionMode):
    """Counts of functions that copy a tensor to the host."""

    def __init__(self, of_kind: Counter[str]) -> None:
        super().__init__()
        self.of_kind = of_kind

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in TENSOR_READS:
            self.of_kind[name] += 1
        return function(*args, **(kwargs or {}))


class AtSteps(TrainerCallback):
    """A callback that records the counts at the end of each optimizer step."""

    def __init__(self, reads: CountedReads) -> None:
        self.reads = reads
        self.totals: list[Counter[str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.totals.append(Counter(self.reads.of_kind))


def reads_by_step(
    folder: Path,
    kind: type[Trainer] = Trainer,
    model: Any = None,
    make_rows: Any = None,
    **arguments: Any,
) -> dict[int, Counter[str]]:
    """Return the reads after the end of each optimizer step until the next, by step."""
    reads = CountedReads()
    recorder = AtSteps(reads)
    settings = {"logging_strategy": "steps", "logging_steps": LOGGING_STEPS, "max_steps": STEPS, **arguments}
    # More data than steps, since the sampler reads at the end of an epoch.
    micro_batches = (STEPS + 2) * settings.get("gradient_accumulation_steps", 1)
    rows = (vector_rows if make_rows is None else make_rows)(4 * micro_batches)
    parameters = {"train_dataset": Rows(rows), "callbacks": [recorder]}
    trainer = quiet_trainer(folder, model, kind=kind, trainer_kwargs=parameters, **settings)
    with reads, CountedCopies(reads.of_kind):
        trainer.train()
    assert len(recorder.totals) == STEPS
    return {step + 1: recorder.totals[step + 1] - recorder.totals[step] for step in range(STEPS - 1)}


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (Trainer, {}),
        (StepwiseTrainer, {}),
        (Trainer, {"gradient_accumulation_steps": 3}),
        (Trainer, {"bf16": True}),
        (Trainer, {"label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 3}),
        (Trainer, {"optim": "adafactor", "max_grad_norm": 0.0}),
        (Trainer, {"logging_nan_inf_filter": False, "disable_tqdm": False}),
        (Trainer, {"include_num_input_tokens_seen": "all", "max_grad_norm": 0.5, "gradient_accumulation_steps": 2}),
        (Trainer, {"enable_jit_checkpoint": True}),
        (Trainer, {"on_nonfinite": "stop", "spike_factor": 9.0, "gradient_accumulation_steps": 2}),
        (Trainer, {"log_speed": True, "gradient_accumulation_steps": 2}),
        (Trainer, {"hang_timeout": 600.0}),
    ],
    ids=[
        *("plain", "own training_step", "accumulating", "bf16", "smoothed labels", "adafactor"),
        *(
            "unfiltered, with bars",
            "tokens counted",
            "checkpoints on a signal",
            "watched for spikes",
            "speed logged",
            "hangs",
        ),
    ],
)
def test_only_logs_read_from_the_device(tmp_path: Path, kind: type[Trainer], arguments: dict[str, Any]) -> None:
    counts = reads_by_step(tmp_path, kind, **arguments)
    assert {step: dict(reads) for step, reads in counts.items() if reads and step % LOGGING_STEPS} == {}
    # Logs read, which proves that reads are counted.
    assert all(counts[step] for step in counts if step % LOGGING_STEPS == 0)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_step_that_can_be_skipped_has_a_single_read(tmp_path: Path, policy: str) -> None:
    settings = {"save_strategy": "steps", "save_steps": STEPS, "gradient_accumulation_steps": 2}
    counts = reads_by_step(tmp_path, on_nonfinite=policy, spike_factor=9.0, **settings)
    assert {reads.total() for step, reads in counts.items() if step % LOGGING_STEPS} == {1}


def test_a_log_reads_all_its_numbers_at_once(tmp_path: Path) -> None:
    assert reads_by_step(tmp_path)[LOGGING_STEPS].total() == 1


def sentences(count: int) -> list[Any]:
    """Return rows of equal length for both models."""
    return [
        {"input_ids": torch.arange(1, 7), "attention_mask": torch.ones(6, dtype=torch.long), "labels": torch.arange(6)}
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("make_model", "arguments"),
    [
        (tiny_bert_for_masked_tokens, {"gradient_accumulation_steps": 2}),
        (tiny_gpt2, {"include_num_input_tokens_seen": "all"}),
        (tiny_gpt2, {"label_smoothing_factor": 0.1}),
        (tiny_gpt2, {"log_speed": True}),
    ],
    ids=["BERT", "GPT-2", "GPT-2 with smoothed labels", "GPT-2, speed logged"],
)
def test_a_model_of_transformers_has_no_more_reads_than_in_a_raw_loop(
    tmp_path: Path, make_model: Any, arguments: dict[str, Any]
) -> None:
    reads, model = CountedReads(), make_model()
    totals: list[Counter[str]] = []
    with reads, CountedCopies(reads.of_kind):
        run_raw(model, sentences(3 * BATCH_SIZE), 1, lambda: totals.append(Counter(reads.of_kind)))
    # The model's masks read.
    raw_reads = totals[2] - totals[1]
    accumulation = arguments.get("gradient_accumulation_steps", 1)
    most = Counter({name: number * accumulation for name, number in raw_reads.items()})
    counts = reads_by_step(tmp_path, model=model, make_rows=sentences, **arguments)
    assert {step: dict(reads) for step, reads in counts.items() if step % LOGGING_STEPS and not reads <= most} == {}
