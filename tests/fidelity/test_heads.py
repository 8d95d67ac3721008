"""Losses of transformers' heads in each layout of a batch, with both values of `loss_normalization`.

With "exact", loss and gradients are equal in all layouts. With "transformers" there is a warning if and only if the
loss depends on the layout.
"""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from tests.scenarios.data import Rows
from tests.scenarios.trainers import quiet_trainer, warnings_logged

ROWS, TOKENS, VOCABULARY, CLASSES = 8, 7, 40, 3
# Batch size x accumulation.
LAYOUTS = ((8, 1), (4, 2), (1, 8))
# Rounding in single precision.
PRECISION = 1e-5
# A layout changes the loss by labels' shares or a factor of 2, if at all.
DEPENDS = 1e-4
# Value -> names of settings that have it in a tiny config, in one or another architecture.
SIZES: dict[int, str] = {
    VOCABULARY: "vocab_size",
    64: "max_position_embeddings n_positions",
    32: "intermediate_size ffn_dim d_ff hidden_dim encoder_ffn_dim decoder_ffn_dim image_size",
    16: "hidden_size d_model n_embd dim",
    8: "head_dim d_kv patch_size",
    4: "num_local_experts",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_key_value_heads num_experts_per_tok type_vocab_size eos_token_id",
    1: "bos_token_id",
    0: "pad_token_id",
}
SETTINGS = {name: size for size, names in SIZES.items() for name in names.split()}
# Head -> its kind of labels.
HEADS = {
    "BertLMHeadModel": "tokens",
    "GPT2LMHeadModel": "tokens",
    "MixtralForCausalLM": "tokens",
    "ModernBertForMaskedLM": "tokens",
    "T5ForConditionalGeneration": "tokens",
    "MarianMTModel": "tokens",
    "DebertaV2ForSequenceClassification": "classes",
    "GPT2ForSequenceClassification": "classes",
    "DebertaForTokenClassification": "tags",
    "LlamaForQuestionAnswering": "spans",
    "BertForMultipleChoice": "choices",
    "BeitForImageClassification": "images",
    "BertForPreTraining": "tokens",
}
# The loss is a sum of two means, over tokens and over rows.
NOT_EXACT = {"BertForPreTraining"}


class Step(NamedTuple):
    """Loss, norm of the gradients and warnings of an optimizer step."""

    loss: float
    norm: float
    warnings: list[str]


def make_model(name: str) -> Any:
    """Return a tiny model without dropout."""
    kind = getattr(transformers, name)
    base = kind.config_class()
    settings = {key: value for key, value in SETTINGS.items() if hasattr(base, key)}
    if base.is_encoder_decoder:
        settings["decoder_start_token_id"] = 0
    config = kind.config_class(**settings, num_labels=2 if HEADS[name] == "spans" else CLASSES)
    for key, value in list(vars(config).items()):
        if isinstance(value, float) and ("drop" in key or "jitter" in key):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    return kind(config).train()


def make_rows(name: str, model: Any) -> list[dict[str, Any]]:
    """Return rows with unequal numbers of labels."""
    kind, draw = HEADS[name], torch.Generator().manual_seed(1)
    accepted = inspect.signature(model.forward).parameters
    ids = torch.randint(5, VOCABULARY, (ROWS, TOKENS), generator=draw)
    classes = torch.randint(0, CLASSES, (ROWS,), generator=draw)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "images":
        batch = {"pixel_values": torch.randn(ROWS, 3, 32, 32, generator=draw), "labels": classes}
    elif kind == "spans":
        batch |= {"start_positions": classes, "end_positions": classes + 2}
    elif kind == "choices":
        batch = {name: torch.stack([value, value.flip(1)], 1) for name, value in batch.items()}
        batch["labels"] = classes % 2
    elif kind == "classes":
        batch["labels"] = classes
    else:
        batch["labels"] = ids % CLASSES if kind == "tags" else ids.clone()
        for row in range(ROWS):
            batch["labels"][row, : row % 5] = -100
        if "next_sentence_label" in accepted:
            batch["next_sentence_label"] = classes % 2
    return [{key: value[row] for key, value in batch.items() if key in accepted} for row in range(ROWS)]


def take_step(folder: Path, name: str, layout: tuple[int, int], normalization: str) -> Step:
    model = make_model(name)
    with warnings_logged("loss_normalization") as texts:
        torch.manual_seed(0)
        random.seed(0)
        trainer = quiet_trainer(
            folder,
            model,
            trainer_kwargs={"train_dataset": Rows(make_rows(name, model))},
            per_device_train_batch_size=layout[0],
            gradient_accumulation_steps=layout[1],
            max_steps=1,
            logging_strategy="steps",
            logging_steps=1,
            learning_rate=0.0,
            optim="sgd",
            loss_normalization=normalization,
            train_sampling_strategy="sequential",
        )
        losses: list[float] = []
        # With its digits: what is logged is the same, rounded for people.
        norm = trainer._get_grad_norm
        trainer._get_grad_norm = lambda *args, **kwargs: losses.append(trainer._tr_loss.item()) or norm(*args, **kwargs)
        trainer.train()
    return Step(losses[0], trainer.state.log_history[0]["grad_norm"], texts)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_exact_in_each_layout_and_warned_about_if_it_is_not_by_itself(tmp_path: Path, name: str) -> None:
    steps, exact = (
        [take_step(tmp_path, name, layout, normalization) for layout in LAYOUTS]
        for normalization in ("transformers", "exact")
    )
    losses = [step.loss for step in steps]
    depends = max(losses) > min(losses) * (1 + DEPENDS)
    assert any(step.warnings for step in steps) is depends
    values = [(step.loss, step.norm) for step in exact]
    is_exact = all(max(numbers) < min(numbers) * (1 + PRECISION) for numbers in zip(*values, strict=True))
    is_warned = any("neither a mean" in text for step in exact for text in step.warnings)
    assert (is_exact, is_warned) == ((False, True) if name in NOT_EXACT else (True, False))
