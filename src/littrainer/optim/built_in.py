"""The optimizers that need no library but torch."""

from __future__ import annotations

from littrainer.arguments.choices import OptimizerNames
from littrainer.optim.entries import OptimizerEntry, adam, learning_rate, learning_rate_and_settings
from littrainer.optim.optimizer_arguments import truth

BUILT_IN: dict[OptimizerNames, OptimizerEntry] = {
    OptimizerNames.ADAMW_TORCH: OptimizerEntry(("torch.optim:AdamW",), adam),
    OptimizerNames.ADAMW_TORCH_FUSED: OptimizerEntry(
        ("torch.optim:AdamW",), lambda request: {**adam(request), "fused": True}
    ),
    OptimizerNames.ADAFACTOR: OptimizerEntry(
        ("littrainer.optim.adafactor:Adafactor",),
        lambda request: {**learning_rate(request), "scale_parameter": False, "relative_step": False},
    ),
    OptimizerNames.SGD: OptimizerEntry(
        ("torch.optim:SGD",),
        learning_rate_and_settings,
        {"momentum": float, "dampening": float, "weight_decay": float, "nesterov": truth},
    ),
    OptimizerNames.ADAGRAD: OptimizerEntry(
        ("torch.optim:Adagrad",),
        learning_rate_and_settings,
        {"lr_decay": float, "weight_decay": float, "eps": float},
    ),
    OptimizerNames.RMSPROP: OptimizerEntry(
        ("torch.optim:RMSprop",),
        learning_rate_and_settings,
        {"momentum": float, "alpha": float, "eps": float, "weight_decay": float, "centered": truth},
    ),
}
