"""Between two logs no value is read from the device, which would wait until all that was asked of it is done."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from littrainer import Trainer, TrainerCallback
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

# What waits for the device: the first one is below `item()`, `float()`, `bool()` and `tolist()`.
READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "unique2", "_unique2"}
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


class AtSteps(TrainerCallback):
    """Notes what was counted up to the end of each optimizer step."""

    def __init__(self, reads: CountedReads) -> None:
        self.reads = reads
        self.so_far: list[Counter[str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.so_far.append(Counter(self.reads.of_kind))


def reads_by_step(folder: Path, kind: type[Trainer] = Trainer, **arguments: Any) -> dict[int, Counter[str]]:
    """What was read from the end of each optimizer step to the end of the next one, by the number of the first."""
    reads = CountedReads()
    noted = AtSteps(reads)
    settings = {"logging_strategy": "steps", "logging_steps": LOGGING_STEPS, "max_steps": STEPS, **arguments}
    given = {"train_dataset": Rows(vector_rows(4 * STEPS * settings.get("gradient_accumulation_steps", 1)))}
    trainer = quiet_trainer(folder, kind=kind, given={**given, "callbacks": [noted]}, **settings)
    with reads:
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
    ],
    ids=["plain", "own training_step", "accumulating", "bf16", "smoothed labels", "adafactor", "unfiltered, with bars"],
)
def test_nothing_is_read_but_where_losses_are_logged(
    tmp_path: Path, kind: type[Trainer], arguments: dict[str, Any]
) -> None:
    found = reads_by_step(tmp_path, kind, **arguments)
    assert {step: dict(reads) for step, reads in found.items() if reads and step % LOGGING_STEPS} == {}
    # Logging reads, or nothing was counted.
    assert all(found[step] for step in found if step % LOGGING_STEPS == 0)


def test_a_read_of_a_scripts_own_is_noticed(tmp_path: Path) -> None:
    class Reading(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss: Any = super().compute_loss(*args, **kwargs)
            assert loss.item() > 0
            return loss

    assert all(
        reads == {"_local_scalar_dense": 1}
        for step, reads in reads_by_step(tmp_path, Reading).items()
        if step % LOGGING_STEPS
    )
