"""A check that a model separates documents in a packed row, by running it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from littrainer.data.collators import default_data_collator
from littrainer.data.loaders import move_batch
from littrainer.data.packing import PackedCollator
from littrainer.loop.loss_normalization import preserve_model_state
from littrainer.model.facts import base_model, is_causal_lm, read_model_facts
from littrainer.strategies.model_wrapping import HALF_TYPES

TOKENS = 8
# Relative tolerances of logits in single and half precision: with another document before, and alone.
LEAK_TOLERANCES = 1e-5, 1e-2
SHAPE_TOLERANCES = 2e-3, 5e-2
REMEDY = "Leave it out; max_tokens_per_batch saves padding with any model"


def check_packing(args: Any, model: nn.Module, wrapped: nn.Module, loader: Any) -> None:
    """Refuse to train on packed rows if the model's attention crosses documents.

    Two short documents are run in a packed row and alone.

    Raises:
        ValueError: the model is no causal language model, takes no position ids, or mixes documents.
    """
    collate = getattr(loader, "collate_fn", None)
    if not isinstance(collate, PackedCollator):
        return
    name, facts = type(base_model(model)).__name__, read_model_facts(model)
    if not (facts.shifts_labels or is_causal_lm(model)):
        raise _make_error(args, f"{name} is no causal language model, which predicts each token from those before it")
    if "position_ids" not in facts.forward_arguments:
        raise _make_error(args, f"{name}.forward takes no position_ids, which say where a document begins")
    if getattr(base_model(model), "_is_stateful", False):
        raise _make_error(args, f"{name} has recurrent layers, whose state goes from each document to the next")
    config = base_model(model).config
    vocabulary = getattr(config.get_text_config() if hasattr(config, "get_text_config") else config, "vocab_size", 2)
    generator = torch.Generator().manual_seed(0)
    # Special tokens are at the ends of a vocabulary.
    ids = torch.randint(vocabulary // 4, max(vocabulary // 2, 2), (3, TOKENS), generator=generator)
    ids[1] = (ids[0] + 1) % vocabulary
    join = PackedCollator(default_data_collator, 2 * TOKENS, collate.padding, flattens=collate.flattens)

    def compute_logits(batch: dict[str, Any]) -> torch.Tensor:
        batch.pop("labels", None)
        outputs = wrapped(**move_batch(batch, args.device, False))
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        return logits.float()

    def run_second(first: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last document when packed after another."""
        rows = [[{"input_ids": first}, {"input_ids": ids[2]}], [{"input_ids": ids[2]}]]
        return compute_logits(join(rows))[0, TOKENS : 2 * TOKENS]

    wrapped = getattr(wrapped, "_orig_mod", wrapped)
    with preserve_model_state(wrapped):
        packed, changed = run_second(ids[0]), run_second(ids[1])
        alone = compute_logits({"input_ids": ids[2:]})[0]
    is_half = args.bf16 or args.fp16 or any(part.dtype in HALF_TYPES for part in model.parameters())
    largest, attention = float(alone.abs().max()), getattr(config, "_attn_implementation", None)
    if (leak := float((packed - changed).abs().max())) > LEAK_TOLERANCES[is_half] * largest:
        uses_cache = getattr(config, "use_cache", False)
        remedy = "Set use_cache=False, without which masks know nothing of documents" if uses_cache else REMEDY
        reason = f"in {name} (attention {attention}) a document sees those before it in its row"
        raise _make_error(args, f"{reason}: its logits change by {leak:.2g} with them", remedy)
    if (difference := float((packed - alone).abs().max())) > SHAPE_TOLERANCES[is_half] * largest:
        reason = f"{name} (attention {attention}) does not count positions from 0 in each document of a row"
        raise _make_error(args, f"{reason}: its logits differ by {difference:.2g} from those of the document alone")


def _make_error(args: Any, reason: str, remedy: str = REMEDY) -> ValueError:
    return ValueError(f"pack_to_length={args.pack_to_length} is not possible: {reason}. {remedy}.")
