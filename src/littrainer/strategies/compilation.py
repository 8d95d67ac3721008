"""`torch.compile` of a model, as the training arguments ask for it."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from littrainer.arguments.process import NO_COMPILATION


def compile_keywords(args: Any) -> dict[str, Any] | None:
    """The keywords for `torch.compile`; None where nothing is compiled."""
    backend = (args.torch_compile_backend or NO_COMPILATION).lower()
    if not args.torch_compile or backend == NO_COMPILATION:
        return None
    keywords: dict[str, Any] = {"backend": backend}
    if args.torch_compile_mode is not None:
        keywords["mode"] = args.torch_compile_mode
    return keywords


def is_compiled(model: nn.Module) -> bool:
    """Whether this is what `torch.compile` returned."""
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return compiled is not None and isinstance(model, compiled)
