"""Arguments about number formats, memory savings and compilation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from littrainer.arguments.about import about

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass
class PrecisionFields:
    """Mixed precision, activation checkpointing, compilation, fused kernels and memory pressure."""

    bf16: bool = field(default=False, metadata=about("Train in bfloat16 mixed precision."))
    fp16: bool = field(default=False, metadata=about("Train in float16 mixed precision with loss scaling."))
    bf16_full_eval: bool = field(default=False, metadata=about("Hold the model wholly in bfloat16 during evaluation."))
    fp16_full_eval: bool = field(default=False, metadata=about("Hold the model wholly in float16 during evaluation."))
    tf32: bool | None = field(
        default=None,
        metadata=about(
            "Allow (true) or forbid (false) TF32 matrix products on NVIDIA GPUs; unset leaves torch's setting alone."
        ),
    )
    activation_checkpointing: bool | None = field(
        default=None,
        metadata=about(
            "Recompute activations in the backward pass instead of storing them: less memory, more time.",
            nargs="?",
            const=True,
        ),
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata=about("Further settings of activation checkpointing, such as `use_reentrant`.")
    )
    gradient_checkpointing: bool | None = field(
        default=None, metadata=about("Other name of `activation_checkpointing`.", nargs="?", const=True)
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata=about("Other name of `activation_checkpointing_kwargs`.")
    )
    torch_compile: bool = field(default=False, metadata=about("Compile the model with `torch.compile`."))
    torch_compile_backend: str | None = field(
        default=None, metadata=about("Backend for `torch.compile`; naming one switches compilation on.")
    )
    torch_compile_mode: str | None = field(
        default=None, metadata=about("Mode for `torch.compile`; naming one switches compilation on.")
    )
    use_liger_kernel: bool = field(
        default=False, metadata=about("Replace layers of the model by Liger's fused Triton kernels.")
    )
    liger_kernel_config: dict[str, bool] | None = field(
        default=None,
        metadata=about("Which Liger kernels to apply, by name; unset applies the usual ones for the model."),
    )
    use_cache: bool = field(default=False, metadata=about("Value of `model.config.use_cache` during training."))
    neftune_noise_alpha: float | None = field(
        default=None, metadata=about("Strength of the NEFTune noise added to embeddings in training; unset adds none.")
    )
    torch_empty_cache_steps: int | None = field(
        default=None,
        metadata=about("Return the accelerator's cached memory every so many optimizer steps; unset never does."),
    )
    auto_find_batch_size: bool = field(
        default=False, metadata=about("Start over with a smaller micro-batch when memory runs out, until it fits.")
    )
