"""Sequence and context parallelism: each process computes a part of the positions of each row.

Hooks on the model cut a batch along the sequence and join the outputs, so that callers pass full rows and receive the
loss and the logits of full rows. Within attention, processes exchange heads for positions (`sp_size`), or gather keys
and values (`cp_size`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from littrainer.arguments.sharding import get_sharding_plan
from littrainer.distributed.layout import get_process_layout, get_requested_sizes, get_sequence_settings
from littrainer.model.facts import base_model, is_causal_lm, read_model_facts
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.strategies.model_wrapping import HALF_TYPES

# Keyword by which a model passes the shard to its attention functions.
SHARD = "sequence_shard"
# Attribute of attention functions that accept it.
EXCHANGES = "_exchanges_sequences"
# Values of added positions, 0 for others; labels there are ignored. Earlier positions do not attend to them.
FILLS = {"labels": -100, "shift_labels": -100, "attention_mask": 1}
# Switches of outputs that are not joined.
OUTPUT_SWITCHES = ("output_attentions", "output_hidden_states", "output_router_logits")
# Relative tolerances of the check, in single and half precision.
TOLERANCES = 2e-3, 5e-2


# ---- Collectives with gradients --------------------------------------------------------------------------------------


class _AllToAll(torch.autograd.Function):
    """Exchange of the entries of dimension 0 between processes."""

    @staticmethod
    def forward(ctx: Any, pieces: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received, pieces, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _AllToAll.apply(gradients[0].contiguous(), ctx.group), None


class _AllGather(torch.autograd.Function):
    """Tensors of all processes in a new dimension 0; each process receives the sum of its tensor's gradients."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        gathered = piece.new_empty((group.size(), *piece.shape))
        # Newer releases of torch warn of the earlier name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered.flatten(0, 1), piece.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        received = torch.empty_like(gradients[0], memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, gradients[0].contiguous(), group=ctx.group)
        return received.sum(dim=0), None


class _SumLosses(torch.autograd.Function):
    """Sum of the processes' losses. Each process differentiates the sum, so the gradient counts once for each."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.size = group.size()
        total = loss.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.size, None


def gather_positions(piece: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    return _AllGather.apply(piece, group).movedim(0, dim).flatten(dim, dim + 1)


def exchange_dimensions(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Give away parts of dimension 1, and receive parts of dimension 2, in the order of the ranks."""
    pieces = tensor.unflatten(1, (group.size(), -1)).movedim(1, 0).contiguous()
    return _AllToAll.apply(pieces, group).movedim(0, 2).flatten(2, 3)


# ---- Attention -------------------------------------------------------------------------------------------------------


@dataclass
class SequenceShard:
    """This process's part of a batch, for attention functions.

    Parameters:
        length: positions of full rows, without added positions.
        masks: attention mask of full rows, or a dict with a mask for each type of layer.
        position_ids: positions of full rows.
    """

    group: Any
    gathers_keys: bool
    length: int
    masks: Any
    position_ids: torch.Tensor

    def attend(
        self, attention: Callable[..., Any], module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute attention over full rows; the tensors have shape (batch, heads, positions, features)."""
        masks = self.masks
        mask = masks[module.config.layer_types[module.layer_idx]] if isinstance(masks, Mapping) else masks
        if "position_ids" in kwargs:
            kwargs["position_ids"] = self.position_ids
        if not self.gathers_keys:
            query, key, value = (exchange_dimensions(tensor, self.group) for tensor in (query, key, value))
            output, _ = attention(module, query, key, value, mask, *args, **kwargs)
            return exchange_dimensions(output, self.group), None
        key, value = (gather_positions(tensor, 2, self.group) for tensor in (key, value))
        start = self.group.rank() * query.shape[2]
        end = start + query.shape[2]
        if mask is None:
            # Imports the compiler.
            from torch.nn.attention.bias import CausalBias, CausalVariant

            # This mask is no tensor of queries by keys, which each layer would keep for its backward pass; its
            # constructor alone would allocate such a tensor.
            mask = torch.empty(1, 1).as_subclass(CausalBias)
            CausalBias.__init__(mask, CausalVariant.LOWER_RIGHT, end - start, end)
            if torch.is_autocast_enabled(query.device.type):
                # With this mask torch compares the types before autocast changes them.
                dtype = torch.get_autocast_dtype(query.device.type)
                query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            return attention(module, query, key[:, :, :end], value[:, :, :end], mask, *args, **kwargs)
        mask = mask[:, :, start:end]
        if not mask.is_floating_point():
            # Later keys are masked for all queries of this process.
            key, value, mask = key[:, :, :end], value[:, :, :end], mask[..., :end]
        return attention(module, query, key, value, mask, *args, **kwargs)


def wrap_attention(attention: Any) -> Any:
    """Return the attention function, extended by `sequence_shard`; without this keyword it is unchanged."""
    if getattr(attention, EXCHANGES, False):
        return attention

    @functools.wraps(attention)
    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        shard = kwargs.pop(SHARD, None)
        if shard is None:
            return attention(module, query, key, value, attention_mask, *args, **kwargs)
        return shard.attend(attention, module, query, key, value, *args, **kwargs)

    setattr(attend, EXCHANGES, True)
    return attend


def wrap_attention_of(model: nn.Module) -> None:
    """Wrap the model's attention function for all models, in transformers' registry or, if eager, in its module."""
    name = get_attention_name(model)
    if name != "eager":
        registry = get_attention_registry()
        registry.register(name, wrap_attention(registry[name]))
        return
    namespaces: set[Any] = {sys.modules[type(module).__module__] for module in model.modules()}
    for namespace in namespaces:
        if hasattr(namespace, "eager_attention_forward"):
            namespace.eager_attention_forward = wrap_attention(namespace.eager_attention_forward)


def get_attention_name(model: Any) -> str | None:
    return model.config.get_text_config()._attn_implementation


def get_attention_registry() -> Any:
    return importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS


def create_masks(model: Any, rows: torch.Tensor, length: int, attention_mask: Any, position_ids: Any) -> Any:
    """Return the attention masks of rows, as the model's attention function needs them.

    Parameters:
        length: number of positions before those that were added.
    """
    create: Any = importlib.import_module("transformers.masking_utils").create_masks_for_generate
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    keywords = {
        "config": model.config,
        "inputs_embeds": torch.empty(*rows.shape[:2], 1, dtype=dtype, device=rows.device),
        "attention_mask": attention_mask,
        "past_key_values": None,
        "position_ids": position_ids,
    }
    # Earlier releases of transformers have other parameters.
    earlier = {"input_embeds": keywords["inputs_embeds"], "cache_position": torch.arange(rows.shape[1]).to(rows.device)}
    parameters = inspect.signature(create).parameters
    masks = create(**{name: value for name, value in {**keywords, **earlier}.items() if name in parameters})
    for mask in masks.values() if isinstance(masks, Mapping) else (masks,):
        if isinstance(mask, torch.Tensor) and mask.is_floating_point():
            # Eager attention of a query without any key is a mean over all keys.
            mask[..., length:] = -torch.inf
    return masks


# ---- The model -------------------------------------------------------------------------------------------------------


class _Hook:
    """Hook of a model that does nothing in copies and pickles of the model."""

    def __init__(self, function: Callable[..., Any] | None = None):
        self._function = function

    def __call__(self, *values: Any) -> Any:
        return None if self._function is None else self._function(*values)

    def __reduce__(self) -> Any:
        return _Hook, ()


class SequenceCutter:
    """Hooks of a model that cut its inputs and join its outputs.

    Attributes:
        gathers_logits: whether logits of full rows are returned with labels too; without labels they always are.

    Raises:
        ValueError: the arguments or the model do not support it.
    """

    def __init__(self, args: Any, model: nn.Module, gathers_logits: bool):
        _, sizes = get_requested_sizes(args)
        self._size = sizes["cp_size"] * sizes["sp_size"]
        self._name = f"{'sp_size' if sizes['sp_size'] > 1 else 'cp_size'}={self._size}"
        self._settings = get_sequence_settings(args)
        self._model = model
        self._base: Any = base_model(model)
        self._device, self._is_half = args.device, args.bf16 or args.fp16
        self.gathers_logits = gathers_logits
        for reason in find_conflicts(args):
            raise self._make_error(reason)
        if self._settings.attention is not None and is_a(self._base, "model of transformers"):
            self._base.set_attn_implementation(self._settings.attention)
        for reason in find_unsupported(model, self._size, self._settings.gathers_keys):
            raise self._make_error(reason)
        wrap_attention_of(self._base)
        self._group = get_sequence_group(dist.group.WORLD, self._size)
        self._handles: list[Any] = []
        self._has_compared_rows = False

    def install(self) -> None:
        if not self._handles:
            cut, join = _Hook(self._cut), _Hook(self._join)
            self._handles = [
                self._model.register_forward_pre_hook(cut, with_kwargs=True),
                self._model.register_forward_hook(join, with_kwargs=True),
            ]

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def check(self) -> None:
        """Compare the loss and the logits of two rows with those that this process computes alone.

        Raises:
            ValueError: they differ, or the model fails.
        """
        model, modes = self._model, {module: module.training for module in self._model.modules()}
        is_half = self._is_half or any(parameter.dtype in HALF_TYPES for parameter in model.parameters())
        vocabulary = self._base.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (2, 4 * self._size - 1), generator=torch.Generator().manual_seed(0))
        ids = ids.to(self._device)
        mask = torch.ones_like(ids)
        mask[1, -2:] = 0
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, FILLS["labels"])}
        before = self.gathers_logits, self._settings
        self.gathers_logits, self._settings = True, replace(self._settings, length=None)
        model.eval()
        try:
            with torch.no_grad():
                try:
                    shared = model(**batch)
                except (RuntimeError, TypeError, IndexError) as error:
                    failure = f"{type(error).__name__}: {str(error).rstrip('.')}"
                    raise self._make_error(f"{type(self._base).__name__} fails with {failure}") from error
                self.remove()
                alone = model(**batch)
        finally:
            self.install()
            self.gathers_logits, self._settings = before
            self._has_compared_rows = False
            for module, mode in modes.items():
                module.training = mode
        for name in ("loss", "logits"):
            values, expected = shared[name], alone[name]
            if name == "logits":
                values, expected = values[mask == 1], expected[mask == 1]
            difference = float((values - expected).abs().max() / expected.abs().max())
            if not difference <= TOLERANCES[is_half]:
                raise self._make_error(
                    f"the {name} of {type(self._base).__name__} would differ by {difference:.2g} of the largest "
                    "value, so that more than its attention functions combines positions"
                )

    def _make_error(self, reason: str) -> ValueError:
        return ValueError(
            f"parallelism_config with {self._name} is not possible: {reason}. Or leave it at 1, and use fsdp with "
            "activation checkpointing."
        )

    def _cut(self, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("past_key_values") is not None or kwargs.get("logits_to_keep"):
            # Each process generates for itself.
            return None
        rows = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
        if args or rows is None:
            raise TypeError(
                f"With {self._name} {type(module).__name__} is called with input_ids or inputs_embeds by name: "
                "model(input_ids=..., labels=...)."
            )
        length = rows.shape[1]
        if self._settings.length not in (None, length):
            raise ValueError(
                f"A batch has rows of {length} positions, and sp_handler has sp_seq_length={self._settings.length}, "
                "which is not variable. Pad all rows to that length, or leave both out."
            )
        batch = {name: value for name, value in kwargs.items() if getattr(value, "ndim", 0) > 0}
        for name, value in batch.items():
            if value.ndim < 2 or value.shape[1] != length:
                raise ValueError(
                    f"{self._name} cuts a batch along its {length} positions, and {name} has the shape "
                    f"{tuple(value.shape)}. Leave {name} out of the batch."
                )
        if not self._has_compared_rows:
            self._compare_rows(batch)
        if "labels" in batch and "shift_labels" not in batch:
            batch["shift_labels"] = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=FILLS["labels"])
        local = -(-length // self._size)
        missing = local * self._size - length
        batch = {name: _lengthen(value, missing, FILLS.get(name, 0)) for name, value in batch.items()}
        positions = torch.arange(length + missing, device=rows.device)[None]
        mask, position_ids = batch.pop("attention_mask", None), batch.get("position_ids")
        if position_ids is not None and missing:
            position_ids[:, length:] = position_ids[:, length - 1 : length] + positions[:, 1 : missing + 1]
        rows = batch["input_ids" if "input_ids" in batch else "inputs_embeds"]
        masks = create_masks(self._base, rows, length, mask, position_ids)
        batch.setdefault("position_ids", positions)
        shard = SequenceShard(self._group, self._settings.gathers_keys, length, masks, batch["position_ids"])
        start = self._group.rank() * local
        cut = {name: value[:, start : start + local].contiguous() for name, value in batch.items()}
        further: dict[str, Any] = {"attention_mask": None, "use_cache": False, SHARD: shard}
        if "labels" in batch and kwargs.get("num_items_in_batch") is None:
            further["num_items_in_batch"] = (batch["shift_labels"] != FILLS["labels"]).sum()
        return args, {**kwargs, **cut, **further}

    def _compare_rows(self, batch: Mapping[str, torch.Tensor]) -> None:
        sums = {name: (tuple(value.shape), float(value.double().sum())) for name, value in batch.items()}
        others: list[Any] = [None] * self._size
        dist.all_gather_object(others, sums, group=self._group)
        if any(other != sums for other in others):
            raise ValueError(
                f"With {self._name} neighbouring processes share rows, and the first batch differs between them: "
                f"{'; '.join(map(str, others))} (shapes and sums). Seed what makes the dataset and draws in its "
                "collator."
            )
        self._has_compared_rows = True

    def _join(self, module: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        shard = kwargs.get(SHARD)
        if shard is None:
            return None
        if not isinstance(outputs, dict):
            raise TypeError(
                f"With {self._name} {type(module).__name__} has to return a dict: leave return_dict at True."
            )
        unjoined = [name for name, value in outputs.items() if value is not None and name not in ("loss", "logits")]
        if unjoined:
            raise NotImplementedError(f"{self._name} does not join {', '.join(unjoined)} of {type(module).__name__}.")
        joined = {}
        if "loss" in outputs:
            joined["loss"] = _SumLosses.apply(outputs["loss"], self._group)
        if self.gathers_logits or not joined:
            joined["logits"] = gather_positions(outputs["logits"], 1, self._group)[:, : shard.length]
        return type(outputs)(**joined)


def _lengthen(tensor: torch.Tensor, missing: int, fill: int) -> torch.Tensor:
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor.new_full((len(tensor), missing, *tensor.shape[2:]), fill)], dim=1)


@functools.lru_cache(maxsize=1)
def get_sequence_group(world: Any, size: int) -> Any:
    """Return the group of neighbouring processes that share sequences; the first call is collective."""
    group, _ = dist.new_subgroups(size)
    return group


# ---- What is refused -------------------------------------------------------------------------------------------------


def find_conflicts(args: Any) -> Iterator[str]:
    reasons = {
        "fsdp_config with version 1 shards in another way, so set {'version': 2}": (
            getattr(get_sharding_plan(args), "version", None) == 1
        ),
        "neftune_noise_alpha adds noise that depends on the length of a row, so leave it out": args.neftune_noise_alpha,
        "use_liger_kernel replaces the loss, so leave it out": args.use_liger_kernel,
        "torch_compile cannot trace exchanges between processes, so leave it out": args.torch_compile,
        "auto_find_batch_size and auto_micro_batch cannot repeat a pass in which processes wait for each other, so "
        "lower per_device_train_batch_size": args.auto_find_batch_size or args.auto_micro_batch,
    }
    yield from (reason for reason, applies in reasons.items() if applies)


def find_unsupported(model: nn.Module, size: int, gathers_keys: bool) -> Iterator[str]:
    base: Any = base_model(model)
    name, facts = type(base).__name__, read_model_facts(model)
    predicts_next = is_a(base, "model of transformers") and (facts.shifts_labels or is_causal_lm(base))
    if not (predicts_next and facts.accepts_loss_kwargs):
        yield f"{name} is no language model of transformers that predicts each token from those before it"
        return
    attention, config = get_attention_name(base), base.config.get_text_config()
    is_registered = attention == "eager" or attention in get_attention_registry()
    if not (is_registered and getattr(base, "_supports_attention_backend", False)):
        yield f"{name} does not call its attention ({attention}) by transformers' AttentionInterface"
    if "position_ids" not in facts.forward_arguments:
        yield f"{name}.forward takes no position_ids"
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        yield "the adapter adds virtual tokens to each row"
    if gathers_keys and attention not in ("eager", "sdpa"):
        yield (
            f"keys are gathered for eager and sdpa attention, and {name} has {attention}. Use sp_size, or cp_handler="
            "{'cp_comm_strategy': 'alltoall'}"
        )
    for heads in () if gathers_keys else ("num_attention_heads", "num_key_value_heads"):
        if (getattr(config, heads, None) or size) % size:
            yield (
                f"{size} does not divide the {heads}={getattr(config, heads)} of {name}, which the processes share. "
                "Use cp_size, which gathers keys instead"
            )
    for switch in OUTPUT_SWITCHES:
        if getattr(config, switch, False):
            yield f"the config of {name} has {switch}=True, so set it to False"


class SequenceHolder(Protocol):
    """The holder of a training's or an evaluation's hooks."""

    sequences: SequenceCutter | None


@contextmanager
def cut_sequences(
    holder: SequenceHolder, args: Any, model: nn.Module, gathers_logits: bool
) -> Iterator[SequenceCutter | None]:
    """Let processes share each row of the model's batches within the block, if the layout says so.

    Parameters:
        gathers_logits: whether callers read logits of batches with labels.

    Yields:
        the hooks if this block has installed them.
    """
    outer = holder.sequences
    if outer is None and get_process_layout(args).sequence_parallel == 1:
        yield None
        return
    cutter = outer or SequenceCutter(args, model, gathers_logits)
    outer_gathers, cutter.gathers_logits = cutter.gathers_logits, gathers_logits
    holder.sequences = cutter
    cutter.install()
    try:
        yield cutter if outer is None else None
    finally:
        cutter.gathers_logits, holder.sequences = outer_gathers, outer
        if outer is None:
            cutter.remove()
