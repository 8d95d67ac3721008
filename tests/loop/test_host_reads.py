"""Between two logs no value is read from the device, which would wait until all that was asked of it is done."""

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

# What waits for the device: the first one is below `item()`, `float()` and `bool()`.
READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "unique2", "_unique2"}
# The same, where no operation of torch is below it on a CPU.
READS_OF_WHOLE_TENSORS = {"tolist", "cpu"}
LOGGING_STEPS, STEPS = 5, 15


class CountedReads(TorchDispatchMode):
    """Counts what reads a tensor's values on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.of_kind: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in READS:
            self.of_kind[name] += 1
        return function(*args, **(kwargs or {}))


class CountedCopies(TorchFunctionMode):
    """Counts, beside the rest, what takes a whole tensor to the host."""

    def __init__(self, of_kind: Counter[str]) -> None:
        super().__init__()
        self.of_kind = of_kind

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in READS_OF_WHOLE_TENSORS:
            self.of_kind[name] += 1
        return function(*args, **(kwargs or {}))


class AtSteps(TrainerCallback):
    """Notes what was counted up to the end of each optimizer step."""

    def __init__(self, reads: CountedReads) -> None:
        self.reads = reads
        self.so_far: list[Counter[str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.so_far.append(Counter(self.reads.of_kind))


def reads_by_step(
    folder: Path,
    kind: type[Trainer] = Trainer,
    model: Any = None,
    make_rows: Any = None,
    **arguments: Any,
) -> dict[int, Counter[str]]:
    """What was read from the end of each optimizer step to the end of the next one, by the number of the first."""
    reads = CountedReads()
    noted = AtSteps(reads)
    settings = {"logging_strategy": "steps", "logging_steps": LOGGING_STEPS, "max_steps": STEPS, **arguments}
    # The epoch goes on behind the last step: at its end the sampler draws, on the host.
    micro_batches = (STEPS + 2) * settings.get("gradient_accumulation_steps", 1)
    rows = (vector_rows if make_rows is None else make_rows)(4 * micro_batches)
    given = {"train_dataset": Rows(rows), "callbacks": [noted]}
    trainer = quiet_trainer(folder, model, kind=kind, given=given, **settings)
    with reads, CountedCopies(reads.of_kind):
        trainer.train()
    assert len(noted.so_far) == STEPS
    return {step + 1: noted.so_far[step + 1] - noted.so_far[step] for step in range(STEPS - 1)}


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
def test_nothing_is_read_but_where_losses_are_logged(
    tmp_path: Path, kind: type[Trainer], arguments: dict[str, Any]
) -> None:
    found = reads_by_step(tmp_path, kind, **arguments)
    assert {step: dict(reads) for step, reads in found.items() if reads and step % LOGGING_STEPS} == {}
    # Logging reads, or nothing was counted.
    assert all(found[step] for step in found if step % LOGGING_STEPS == 0)


@pytest.mark.parametrize("way", ["skip", "rollback"])
def test_numbers_are_read_once_in_a_step_that_may_be_left_out(tmp_path: Path, way: str) -> None:
    settings = {"save_strategy": "steps", "save_steps": STEPS, "gradient_accumulation_steps": 2}
    found = reads_by_step(tmp_path, on_nonfinite=way, spike_factor=9.0, **settings)
    assert {reads.total() for step, reads in found.items() if step % LOGGING_STEPS} == {1}


def test_a_log_reads_all_its_numbers_at_once(tmp_path: Path) -> None:
    assert reads_by_step(tmp_path)[LOGGING_STEPS].total() == 1


def sentences(count: int) -> list[Any]:
    """Rows of equal length, as both models here take them."""
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
def test_a_model_of_transformers_is_read_no_more_than_by_itself(
    tmp_path: Path, make_model: Any, arguments: dict[str, Any]
) -> None:
    """Some of its own masks read; a raw loop says how much."""
    reads, model = CountedReads(), make_model()
    so_far: list[Counter[str]] = []
    with reads, CountedCopies(reads.of_kind):
        run_raw(model, sentences(3 * BATCH_SIZE), 1, lambda: so_far.append(Counter(reads.of_kind)))
    by_itself = so_far[2] - so_far[1]
    accumulation = arguments.get("gradient_accumulation_steps", 1)
    most = Counter({name: number * accumulation for name, number in by_itself.items()})
    found = reads_by_step(tmp_path, model=model, make_rows=sentences, **arguments)
    assert {step: dict(reads) for step, reads in found.items() if step % LOGGING_STEPS and not reads <= most} == {}
