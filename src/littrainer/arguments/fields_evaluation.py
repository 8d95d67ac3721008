"""Arguments about evaluation during training and by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from littrainer.arguments.about import about
from littrainer.arguments.choices import IntervalStrategy


@dataclass
class EvaluationFields:
    """When to evaluate, on how much at a time, and what metrics are computed from."""

    eval_strategy: IntervalStrategy | str = field(
        default="no", metadata=about("When to evaluate during training: `no`, every `steps` or each `epoch`.")
    )
    eval_steps: float | None = field(
        default=None,
        metadata=about(
            "Optimizer steps between two evaluations (below 1 a share of all steps); unset follows `logging_steps`."
        ),
    )
    eval_delay: float = field(
        default=0, metadata=about("Epochs or steps, by `eval_strategy`, before the first evaluation may happen.")
    )
    per_device_eval_batch_size: int = field(
        default=8, metadata=about("Samples in one evaluation batch on each device.")
    )
    prediction_loss_only: bool = field(
        default=False, metadata=about("Keep only the loss in evaluation, no predictions and no metrics.")
    )
    eval_on_start: bool = field(default=False, metadata=about("Evaluate once before the first training step."))
    eval_do_concat_batches: bool = field(
        default=True,
        metadata=about(
            "Join predictions of all batches to one array; false hands `compute_metrics` a list of batches."
        ),
    )
    eval_use_gather_object: bool = field(
        default=False,
        metadata=about("Gather predictions between processes as Python objects, for outputs that are not tensors."),
    )
    eval_accumulation_steps: int | None = field(
        default=None,
        metadata=about("Evaluation batches after which predictions move to host memory; unset moves them at the end."),
    )
    include_for_metrics: list[str] = field(
        default_factory=list,
        metadata=about("What `compute_metrics` gets besides predictions and labels: `inputs`, `loss`."),
    )
    batch_eval_metrics: bool = field(
        default=False,
        metadata=about("Call `compute_metrics` batch by batch and let it sum up, so that predictions are not kept."),
    )
