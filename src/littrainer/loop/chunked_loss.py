"""The loss of a language model over chunks of tokens, without the logits of a whole batch (`chunked_loss=True`).

In a forward pass the head returns `DeferredLogits`, which record the operations that the model applies to its logits.
Their cross entropy calls the head over chunks of tokens, and computes the gradient of each before the next.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from littrainer.model.facts import base_model, unwrap_user_model

# A chunk has an eighth of the tokens, between these bounds: smaller chunks leave a GPU idle, larger chunks save less.
MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS, DEFAULT_CHUNKS = 128, 1024, 8

warn_once = functools.cache(logging.getLogger(__name__).warning)


def is_loss_chunked(needs_logits: bool) -> bool:
    """Return whether to compute the loss over chunks; warn once if an evaluation prevents it."""
    if needs_logits:
        warn_once(
            "chunked_loss=True: evaluations with predictions or metrics compute the logits of a whole batch. If the "
            "loss suffices, set prediction_loss_only=True or leave out compute_metrics."
        )
    return not needs_logits


def find_head(model: Any) -> tuple[Any, str]:
    """Return the output layer of a language model and its name, or raise a ValueError that names a model without."""
    base, head = base_model(unwrap_user_model(model)), None
    with contextlib.suppress(AttributeError, NotImplementedError):
        head = base.get_output_embeddings()
    if isinstance(head, nn.Module) and getattr(getattr(head, "weight", None), "ndim", 0) == 2:
        return head, type(base).__name__
    raise ValueError(
        f"chunked_loss=True needs a language model with a linear head, and {type(base).__name__} has none: its "
        f"get_output_embeddings() gives {type(head).__name__}. Let it return the head, or leave out chunked_loss."
    )


def call_without_logits(
    model: nn.Module, inputs: dict[str, Any], smoother: Any, num_items_in_batch: Any
) -> tuple[Any, torch.Tensor | None]:
    """Return the outputs of a model, whose loss is computed over chunks of tokens, and the smoothed loss alone."""
    module, name = find_head(model)
    head = _Head(module, type(module), name)
    if smoother is not None:
        head.smoothing, head.divisor = smoother.epsilon, num_items_in_batch
    # Another class, as under FSDP2, and not another module, which others would miss in the model.
    module.__class__ = _make_deferring_class(head.kind)
    vars(module)["_deferring_head"] = head
    try:
        outputs = model(**inputs)
    finally:
        module.__class__ = head.kind
        del vars(module)["_deferring_head"]
    if not head.is_called:
        raise ValueError(head.refuse("another module than get_output_embeddings()"))
    return outputs, head.smoothed_loss


@functools.cache
def _make_deferring_class(kind: type) -> type:
    # torch.compile would compile a graph for each new class.
    @torch.compiler.disable
    def call(module: Any, hidden: torch.Tensor) -> DeferredLogits:
        return vars(module)["_deferring_head"].defer(hidden)

    return type(kind.__name__, (kind,), {"__call__": call})


@dataclass
class _Head:
    module: Any
    kind: Any
    model_name: str
    smoothing: float = 0.0
    # Divisor of a mean, and of the smoothed loss; None is the number of tokens.
    divisor: Any = None
    is_called: bool = False
    smoothed_loss: torch.Tensor | None = None

    def defer(self, hidden: torch.Tensor) -> DeferredLogits:
        self.is_called = True
        return DeferredLogits(self, hidden)

    def refuse(self, operation: str) -> str:
        text = f"chunked_loss=True: the loss of {self.model_name} takes {operation}, and logits are"
        return f"{text} not computed for a whole batch. Leave out chunked_loss."

    def sum_losses(self, hidden: torch.Tensor, labels: torch.Tensor, change: Callable[..., Any]) -> torch.Tensor:
        """Call the head, and with it its hooks, once for the sum of all tokens' losses."""
        module, forward, is_training = self.module, self.module.forward, torch.is_grad_enabled()
        replaced = {name: value for name, value in vars(module).items() if name == "forward"}

        def sum_chunks(hidden: torch.Tensor) -> torch.Tensor:
            # FSDP has gathered the parameters here.
            parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
            arguments = (lambda chunk: change(forward(chunk)), labels, self.smoothing, is_training, hidden)
            # Their hooks are called in the backward pass.
            hooks = [parameter._backward_hooks for parameter in parameters]
            try:
                for parameter in parameters:
                    parameter._backward_hooks = None
                return _ChunkedCrossEntropy.apply(*arguments, *parameters)
            finally:
                for parameter, hooks_of_parameter in zip(parameters, hooks, strict=True):
                    parameter._backward_hooks = hooks_of_parameter

        module.forward = sum_chunks
        try:
            return self.kind.__call__(module, hidden)
        finally:
            del module.forward
            vars(module).update(replaced)


def _record(function: Callable[..., torch.Tensor]) -> Callable[..., DeferredLogits]:
    """Return a method of deferred logits that applies a function to the logits of each chunk."""

    def record(self: DeferredLogits, *args: Any, **kwargs: Any) -> DeferredLogits:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        # A trained tensor would get no gradient, and values of tokens would not be divided into chunks.
        if any(value.requires_grad or value.dim() > 2 or value.shape[:-1].numel() > 1 for value in tensors):
            raise TypeError(self._head.refuse(f"{function.__name__} of logits and a tensor"))
        change = self._change
        return DeferredLogits(self._head, self._hidden, lambda logits: function(change(logits), *args, **kwargs))

    return record


class DeferredLogits:
    """Logits `(..., vocabulary)` that are not computed: the head's input, and the operations on its output."""

    def __init__(self, head: _Head, hidden: torch.Tensor, change: Callable[..., Any] = lambda logits: logits):
        self._head, self._hidden, self._change = head, hidden, change
        self.shape = torch.Size((*hidden.shape[:-1], head.module.weight.shape[0]))
        self.device, self.dtype = hidden.device, hidden.dtype

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self._head.refuse(f"logits.{name}"))

    def _refuse(self, *args: Any) -> Any:
        raise TypeError(self._head.refuse("an index, a comparison or another operator of logits"))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def view(self, *sizes: Any) -> DeferredLogits:
        sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        if sizes[-1] != self.shape[-1]:
            raise TypeError(self._head.refuse(f"logits.view{sizes}"))
        return DeferredLogits(self._head, self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1]), self._change)

    reshape = view
    contiguous = _record(torch.Tensor.contiguous)
    to = _record(torch.Tensor.to)
    float = _record(torch.Tensor.float)
    tanh = _record(torch.tanh)
    __add__ = __radd__ = _record(torch.add)
    __sub__ = _record(torch.sub)
    __mul__ = __rmul__ = _record(torch.mul)
    __neg__ = _record(torch.neg)
    __truediv__ = _record(torch.div)
    __getitem__ = __setitem__ = __rsub__ = __rtruediv__ = __pow__ = __matmul__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        logits = next(value for value in args if isinstance(value, cls))
        if func is torch.tanh:
            return logits.tanh()
        if func is nn.functional.cross_entropy and logits is args[0]:
            return logits._cross_entropy(args[1], **kwargs)
        raise TypeError(logits._head.refuse(f"{getattr(func, '__name__', func)} of logits"))

    # `torch.compiler.disable` would import the compiler here.
    @torch._disable_dynamo
    def _cross_entropy(self, target: torch.Tensor, ignore_index: int, reduction: str, **others: Any) -> torch.Tensor:
        is_plain = others["weight"] is None and not others["label_smoothing"] and reduction != "none"
        if not is_plain or target.shape != self.shape[:-1]:
            raise TypeError(self._head.refuse("more than the sum or mean of the cross entropy of labels"))
        labels = target.flatten()
        # The host waits here for the device, to know the number of tokens.
        counted = labels.ne(ignore_index).nonzero().squeeze(1)
        total = self._head.sum_losses(self._hidden.flatten(0, -2)[counted], labels[counted], self._change)
        divisor = len(counted) if self._head.divisor is None else self._head.divisor
        mean = total / (divisor.to(total.device) if isinstance(divisor, torch.Tensor) else divisor)
        if self._head.smoothing:
            self._head.smoothed_loss = mean
        return total if reduction == "sum" else mean


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the cross entropies of tokens; the gradient of a chunk is computed before its logits are freed."""

    @staticmethod
    def forward(
        ctx: Any, head: Any, labels: Any, smoothing: float, is_training: bool, hidden: Any, *parameters: Any
    ) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        of_hidden: list[Any] = []
        of_parameters: list[Any] = []
        size = min(max(math.ceil(len(hidden) / DEFAULT_CHUNKS), MIN_CHUNK_TOKENS), MAX_CHUNK_TOKENS)
        for chunk, targets in zip(hidden.split(size), labels.unsqueeze(-1).split(size), strict=True):
            chunk = chunk.detach().requires_grad_(is_training)
            with torch.set_grad_enabled(is_training):
                logits = head(chunk)
            gradient = torch.log_softmax(logits.detach(), -1, dtype=torch.float32)
            total -= (1 - smoothing) * gradient.gather(-1, targets).sum()
            if smoothing:
                total -= smoothing * gradient.mean(-1).sum()
            if not is_training:
                continue
            gradient = gradient.exp_().sub_(smoothing / gradient.shape[-1])
            gradient.scatter_add_(-1, targets, gradient.new_full(targets.shape, smoothing - 1))
            of_chunk, *added = torch.autograd.grad(
                logits, [chunk, *parameters], gradient.to(logits.dtype), allow_unused=True
            )
            # The next chunk needs their memory.
            del logits, gradient
            of_hidden.append(of_chunk)
            pairs = zip(of_parameters, added, strict=False)
            # None for a parameter without a part in the logits, as of an adapter that is not active.
            of_parameters = [old if new is None else old.add_(new) for old, new in pairs] or added
        ctx.save_for_backward(*([torch.cat(of_hidden)] if is_training else []), *of_parameters)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> Any:
        # Without a token the scale may be infinite, which the gradients of 0 must not become.
        scale = scale if ctx.saved_tensors[0].numel() else torch.ones_like(scale)
        return (None, None, None, None, *(None if value is None else value * scale for value in ctx.saved_tensors))
