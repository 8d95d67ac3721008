"""Whether documents that are packed into one row stay apart in a model: found out by running it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from littrainer.data.collators import default_data_collator
from littrainer.data.loaders import move_batch
from littrainer.data.packing import PackedCollator
from littrainer.loop.loss_normalization import preserve_model_state
from littrainer.model.facts import base_model, is_causal_lm, read_model_facts
from littrainer.strategies.mixed_precision import HALF_TYPES

TOKENS = 8
# How much logits may differ, as a share of the largest, in single and in half precision: with another document before,
# which changes nothing but the order of sums in a mixture of experts, and by the shape of what is computed.
LEAK = 1e-5, 1e-2
ROUNDING = 2e-3, 5e-2
INSTEAD = "Leave it out; max_tokens_per_batch saves padding with any model"


def check_packing(args: Any, model: nn.Module, called: nn.Module, loader: Any) -> None:
    """Refuse a training on packed rows whose model would let a document see others of its row.

    Two short documents are run through the model in a row and apart, without gradients and without a trace.

    Parameters:
        model, called: the user's, and what training steps call.

    Raises:
        ValueError: the model predicts no next tokens, takes no position ids, or mixes documents up; it says which.
    """
    collate = getattr(loader, "collate_fn", None)
    if not isinstance(collate, PackedCollator):
        return
    name, facts = type(base_model(model)).__name__, read_model_facts(model)
    if not (facts.shifts_labels or is_causal_lm(model)):
        raise _refusal(args, f"{name} is no causal language model, which predicts each token from those before it")
    if "position_ids" not in facts.forward_arguments:
        raise _refusal(args, f"{name}.forward takes no position_ids, which say where a document begins")
    if getattr(base_model(model), "_is_stateful", False):
        raise _refusal(args, f"{name} has recurrent layers, whose state goes from each document to the next")
    config = base_model(model).config
    vocabulary = getattr(config.get_text_config() if hasattr(config, "get_text_config") else config, "vocab_size", 2)
    generator = torch.Generator().manual_seed(0)
    # Special tokens stand at the ends of a vocabulary.
    ids = torch.randint(vocabulary // 4, max(vocabulary // 2, 2), (3, TOKENS), generator=generator)
    ids[1] = (ids[0] + 1) % vocabulary
    join = PackedCollator(default_data_collator, 2 * TOKENS, collate.padding, flattens=collate.flattens)

    def logits(batch: dict[str, Any]) -> torch.Tensor:
        batch.pop("labels", None)
        outputs = called(**move_batch(batch, args.device, False))
        found = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        return found.float()

    def behind(first: torch.Tensor) -> torch.Tensor:
        rows = [[{"input_ids": first}, {"input_ids": ids[2]}], [{"input_ids": ids[2]}]]
        return logits(join(rows))[0, TOKENS : 2 * TOKENS]

    called = getattr(called, "_orig_mod", called)
    with preserve_model_state(called):
        one, other, alone = behind(ids[0]), behind(ids[1]), logits({"input_ids": ids[2:]})[0]
    is_half = args.bf16 or args.fp16 or any(part.dtype in HALF_TYPES for part in model.parameters())
    largest, attention = float(alone.abs().max()), getattr(config, "_attn_implementation", None)
    if (leaked := float((one - other).abs().max())) > LEAK[is_half] * largest:
        uses_cache = getattr(config, "use_cache", False)
        remedy = "Set use_cache=False, without which masks know nothing of documents" if uses_cache else INSTEAD
        sees = f"in {name} (attention {attention}) a document sees those before it in its row"
        raise _refusal(args, f"{sees}: its logits change by {leaked:.2g} with them", remedy)
    if (differs := float((one - alone).abs().max())) > ROUNDING[is_half] * largest:
        counts = f"{name} (attention {attention}) does not count positions from 0 in each document of a row"
        raise _refusal(args, f"{counts}: its logits differ by {differs:.2g} from those of the document alone")


def _refusal(args: Any, reason: str, remedy: str = INSTEAD) -> ValueError:
    return ValueError(f"pack_to_length={args.pack_to_length} is not possible: {reason}. {remedy}.")
