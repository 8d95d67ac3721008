"""A script that makes mistakes under littrainer and under transformers, and prints the frames that each error shows."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import littrainer

# Imported by tests, it has no folder.
FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class InterruptedModel(Model):
    def forward(self, x: Any, labels: Any = None, **kwargs: Any) -> Any:
        interrupt()


class Interrupted(list[Any]):
    def __getitem__(self, place: Any) -> Any:
        interrupt()


class InterruptedOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        interrupt()


def run(
    library: Any, method: str = "train", model: Any = None, data: Any = None, resume: Any = None, **given: Any
) -> None:
    rows = data or [{"x": torch.ones(2), "labels": 1}] * 4
    args = arguments(library)
    trainer = library.Trainer(
        model=model or Model(), args=args, train_dataset=rows, eval_dataset=rows, **{"callbacks": [], **given}
    )
    getattr(trainer, method)(*([] if resume is None else [resume]))


def arguments(library: Any, **changes: Any) -> Any:
    return library.TrainingArguments(
        str(FOLDER / library.__name__), max_steps=1, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, **changes
    )  # fmt: skip


def interrupted_optimizer(library: Any) -> None:
    model = Model()
    run(library, model=model, optimizers=(InterruptedOptimizer(model.parameters(), lr=0.1), None))


def bad_scheduler(library: Any) -> None:
    class OwnTrainer(library.Trainer):
        def create_scheduler(self, *args: Any, **kwargs: Any) -> str:
            self.lr_scheduler = "linear"
            return self.lr_scheduler

    OwnTrainer(model=Model(), args=arguments(library), train_dataset=[{"x": torch.ones(2), "labels": 1}] * 4).train()


def empty_file(library: Any) -> None:
    (FOLDER / "empty.ckpt").touch()
    run(library, resume=str(FOLDER / "empty.ckpt"))


CASES: dict[str, Any] = {
    "Ctrl-C in forward": lambda library: run(library, model=InterruptedModel()),
    "Ctrl-C in the dataset": lambda library: run(library, data=Interrupted([1] * 4)),
    "Ctrl-C in the optimizer's step": interrupted_optimizer,
    "collator of None": lambda library: run(library, data_collator=lambda samples: None),
    "collator of a number": lambda library: run(library, data_collator=lambda samples: 3),
    "scheduler that is a text": bad_scheduler,
    "empty file as checkpoint": empty_file,
    "unknown optimizer": lambda library: arguments(library, optim="adamW"),
}


def frames_shown(library: Any, case: Any) -> dict[str, Any]:
    try:
        case(library)
    except BaseException as error:
        # As a user sees them: with what led to the error, where that is shown.
        frames: list[Any] = []
        one: BaseException | None = error
        while one is not None:
            walked = traceback.walk_tb(one.__traceback__)
            frames = [[frame.f_globals["__name__"], frame.f_code.co_name] for frame, _ in walked] + frames
            one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        return {"error": f"{type(error).__name__}: {error}", "frames": frames[1:]}
    return {"error": None, "frames": []}


if __name__ == "__main__":
    found = {
        name: {library.__name__: frames_shown(library, case) for library in (littrainer, transformers)}
        for name, case in CASES.items()
    }
    print(json.dumps(found))
