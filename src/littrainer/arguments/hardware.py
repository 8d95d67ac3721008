"""Arguments that depend on what torch and the device at hand can do: checked, and applied where they are switches."""

from __future__ import annotations

import logging
import warnings
from typing import Any

logger = logging.getLogger(__name__)

# Compute capability from which NVIDIA GPUs have TF32 (Ampere).
TF32_CAPABILITY = 8
# As a compiler's backend: compile nothing.
NO_COMPILATION = "no"


def apply_hardware_choices(args: Any) -> None:
    """Check bf16, fp16 and the compiler's backend, and switch TF32 matrix products on or off.

    Raises:
        ValueError: the device or torch lacks what an argument asks for.
    """
    if args.bf16 or args.bf16_full_eval:
        _check_bf16(args)
    if args.mixed_precision == "fp16" and args.device.type == "cpu":
        warnings.warn(
            "fp16 has no effect on a CPU, which trains in the model's own precision; use bf16=True, or a GPU.",
            UserWarning,
            stacklevel=2,
        )
    if args.torch_compile:
        _check_compiler(args)
    if args.tf32 is not None or args.torch_compile:
        _set_tf32(args)


def _check_bf16(args: Any) -> None:
    if args.use_cpu or _has_bf16():
        return
    name = "bf16" if args.bf16 else "bf16_full_eval"
    raise ValueError(
        f"{name}=True needs a GPU with bfloat16 (NVIDIA Ampere or newer), and there is none here. Set use_cpu=True to "
        f"compute in bfloat16 on the CPU, or {name}=False."
    )


def _has_bf16() -> bool:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    if torch.xpu.is_available():
        return torch.xpu.is_bf16_supported()
    return torch.backends.mps.is_available() and torch.backends.mps.is_macos_or_newer(14, 0)


def _check_compiler(args: Any) -> None:
    import torch

    backend = args.torch_compile_backend.lower()
    if backend != NO_COMPILATION and backend not in torch.compiler.list_backends(exclude_tags=()):
        raise ValueError(
            f"torch_compile_backend={args.torch_compile_backend!r} is no backend that torch.compile has here; choose "
            f"eager or one of {', '.join(torch.compiler.list_backends())}."
        )


def _set_tf32(args: Any) -> None:
    has_tf32 = _has_tf32()
    if args.tf32 and not has_tf32:
        raise ValueError(
            "tf32=True needs an NVIDIA GPU of the Ampere generation or newer, and there is none here; leave tf32 unset."
        )
    wanted = args.tf32
    if wanted is None and has_tf32 and (args.bf16 or not args.fp16):
        logger.info("torch_compile=True lets matrix products run in TF32; set tf32=False to forbid it.")
        wanted = True
    if wanted is not None and has_tf32:
        _allow_tf32(wanted)


def _has_tf32() -> bool:
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_properties(torch.cuda.current_device()).major >= TF32_CAPABILITY


def _allow_tf32(allowed: bool) -> None:
    import torch

    if hasattr(torch.backends, "fp32_precision"):
        # torch 2.9 and newer, where the older switches must not be set beside this one.
        torch.backends.fp32_precision = "tf32" if allowed else "ieee"
    else:
        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed
