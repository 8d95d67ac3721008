"""Arguments about the optimizer and about what one optimizer step is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from littrainer.arguments.about import about
from littrainer.arguments.choices import OptimizerNames


@dataclass
class OptimizationFields:
    """Optimizer, weight decay, gradient accumulation, clipping and label smoothing."""

    optim: OptimizerNames | str = field(default="adamw_torch_fused", metadata=about("Name of the optimizer."))
    optim_args: str | None = field(
        default=None,
        metadata=about("Further settings for optimizers that take some, written as `key=value,key=value`."),
    )
    weight_decay: float = field(
        default=0.0,
        metadata=about("Decay applied to weights by the optimizer; biases and normalisation weights are left out."),
    )
    adam_beta1: float = field(default=0.9, metadata=about("AdamW's decay rate for the running mean of gradients."))
    adam_beta2: float = field(
        default=0.999, metadata=about("AdamW's decay rate for the running mean of squared gradients.")
    )
    adam_epsilon: float = field(
        default=1e-8, metadata=about("AdamW's addend to the denominator, which keeps the division stable.")
    )
    optim_target_modules: list[str] | str | None = field(
        default=None,
        metadata=about(
            "Modules that a low-rank optimizer (GaLore, APOLLO) projects: names, a regular expression or `all-linear`."
        ),
    )
    gradient_accumulation_steps: int = field(
        default=1, metadata=about("Micro-batches whose gradients are summed for one optimizer step.")
    )
    average_tokens_across_devices: bool = field(
        default=True,
        metadata=about(
            "Count the target tokens of an optimizer step over all processes, so that each token weighs the same."
        ),
    )
    max_grad_norm: float = field(
        default=1.0,
        metadata=about("Clip the gradient to this 2-norm before an optimizer step; 0 or below never clips."),
    )
    label_smoothing_factor: float = field(
        default=0.0,
        metadata=about(
            "Probability mass taken from the true label and spread over all labels; 0 leaves labels as they are."
        ),
    )
