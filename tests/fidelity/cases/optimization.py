"""Optimizers, clipping, weight decay and schedules."""

from __future__ import annotations

from typing import Any

import torch

from tests.fidelity.record import Record
from tests.fidelity.registry import Script, add_scripts, scenario
from tests.fidelity.side import Side
from tests.scenarios.data import token_rows
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier


def make_script(changes: dict[str, Any]) -> Script:
    """Return a script of eight steps over two epochs, with a checkpoint after each."""
    settings = {"save_strategy": "epoch", **changes}
    return lambda side: side.train(side.vector_trainer(rows=16, eval_rows=5, **settings))


SCHEDULES: dict[str, dict[str, Any]] = {
    "linear_with_warmup_steps": {"lr_scheduler_type": "linear", "warmup_steps": 3},
    "linear_with_warmup_as_a_fraction": {"lr_scheduler_type": "linear", "warmup_steps": 0.3},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "cosine_with_restarts": {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    "polynomial": {"lr_scheduler_type": "polynomial", "warmup_steps": 1, "lr_scheduler_kwargs": {"power": 2.0}},
    "cosine_with_min_lr": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.001}},
    "cosine_warmup_with_min_lr": {
        "lr_scheduler_type": "cosine_warmup_with_min_lr",
        "warmup_steps": 2,
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    },
    "warmup_stable_decay": {
        "lr_scheduler_type": "warmup_stable_decay",
        "warmup_steps": 2,
        "lr_scheduler_kwargs": {"num_decay_steps": 3},
    },
    "reduce_lr_on_plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.9},
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
    },
    "reduce_lr_on_plateau_at_each_epoch": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "mode": "max", "factor": 0.3, "threshold": 0.5},
        "eval_strategy": "epoch",
        "num_train_epochs": 4,
    },
    "greedy": {
        "lr_scheduler_type": "greedy",
        "lr_scheduler_kwargs": {"patience": 1, "factor": 0.7, "min_lr": 1e-4, "smooth": True, "window_size": 2},
        "eval_strategy": "steps",
        "eval_steps": 1,
    },
    "greedy_on_a_metric_that_does_not_improve": {
        "lr_scheduler_type": "greedy",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.2, "mode": "max", "min_lr": 1e-3, "reset_start": 2},
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_on_start": True,
    },
    "cosine_warmup_from_a_share": {
        "lr_scheduler_type": "cosine_warmup_with_min_lr",
        "warmup_steps": 3,
        "lr_scheduler_kwargs": {"min_lr": 0.002, "warmup_lr_rate": 0.2},
    },
    "warmup_stable_decay_of_other_shapes": {
        "lr_scheduler_type": "warmup_stable_decay",
        "warmup_steps": 3,
        "lr_scheduler_kwargs": {
            "num_decay_steps": 4,
            "num_stable_steps": 0,
            "warmup_type": "1-sqrt",
            "decay_type": "linear",
            "min_lr_ratio": 0.1,
        },
    },
}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw_with_weight_decay": {"optim": "adamw_torch", "weight_decay": 0.1, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
    "fused_adamw_with_weight_decay": {"optim": "adamw_torch_fused", "weight_decay": 0.1},
    "adafactor_with_weight_decay": {"optim": "adafactor", "weight_decay": 0.1, "gradient_accumulation_steps": 2},
    "sgd_with_optim_args": {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=True", "weight_decay": 0.01},
    "adagrad_with_optim_args": {"optim": "adagrad", "optim_args": "lr_decay=0.1,eps=1e-6", "weight_decay": 0.2},
    "rmsprop_with_optim_args": {"optim": "rmsprop", "optim_args": "momentum=0.5,alpha=0.8,centered=yes"},
    "no_clipping": {"max_grad_norm": 0, "learning_rate": 0.1},
    "tight_clipping": {"max_grad_norm": 0.05},
}


add_scripts({f"schedule_{name}": make_script(changes) for name, changes in SCHEDULES.items()}, saves=True)
add_scripts({f"optimizer_{name}": make_script(changes) for name, changes in OPTIMIZERS.items()}, saves=True)


@scenario(saves=True)
def weight_decay_of_a_bert(side: Side) -> Record:
    return side.train(
        side.token_trainer(
            tiny_bert_classifier(), token_rows, weight_decay=0.3, save_strategy="epoch", num_train_epochs=1
        )
    )


@scenario(saves=True)
def optimizer_and_schedule_passed_in(side: Side) -> Record:
    model = VectorClassifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    return side.train(
        side.vector_trainer(
            model,
            rows=16,
            trainer_kwargs={"optimizers": (optimizer, schedule)},
            save_strategy="epoch",
            lr_scheduler_type="cosine",
            weight_decay=0.5,
        )
    )


@scenario()
def optimizer_passed_in_without_a_schedule(side: Side) -> Record:
    model = VectorClassifier()
    optimizer = torch.optim.Adam(
        [{"params": model.inner.parameters(), "lr": 0.1}, {"params": model.head.parameters(), "lr": 0.01}]
    )
    return side.train(
        side.vector_trainer(model, rows=16, trainer_kwargs={"optimizers": (optimizer, None)}, warmup_steps=2)
    )


@scenario()
def get_optimizer_class_and_keywords(side: Side) -> Record:
    return side.train(
        side.vector_trainer(rows=16, trainer_kwargs={"optimizer_cls_and_kwargs": (torch.optim.Adamax, {"lr": 0.02})})
    )


@scenario(saves=True)
def optimizer_made_by_a_factory(side: Side) -> Record:
    class Split:
        def __call__(self, model: Any, lr: float) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)

    return side.train(
        side.vector_trainer(
            rows=16, trainer_kwargs={"optimizer_cls_and_kwargs": (Split, {"lr": 0.02})}, save_strategy="epoch"
        )
    )


@scenario(saves=True)
def adafactor_and_greedy_schedule_of_transformers_passed_in(side: Side) -> Record:
    from transformers.optimization import Adafactor, GreedyLR

    model = VectorClassifier()
    optimizer = Adafactor(model.parameters(), lr=0.02, relative_step=False, scale_parameter=False)
    schedule = GreedyLR(optimizer, patience=0, factor=0.5)
    return side.train(
        side.vector_trainer(
            model,
            rows=16,
            eval_rows=5,
            trainer_kwargs={"optimizers": (optimizer, schedule)},
            save_strategy="epoch",
            eval_strategy="steps",
            eval_steps=2,
            metric_for_best_model="eval_loss",
        )
    )
