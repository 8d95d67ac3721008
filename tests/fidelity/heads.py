"""Checks whether losses of transformers' heads depend on the split of a batch: `python -m tests.fidelity.heads`.

Each head that can be built from a tiny config takes one optimizer step on the same eight rows, as 8x1, 4x2 and 1x8
(batch size x accumulation), with both values of `loss_normalization`; the rows have unequal numbers of labels.

With "exact" loss and gradient norm are equal in all layouts, to 1e-6, unless a warning says
that the head is of neither kind, or its outputs depend on the other rows. With "transformers" there is a warning if and
only if the loss depends on the layout. Names on the command line choose heads; all are tried in about ten minutes.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import math
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from littrainer.callbacks.progress import PrinterCallback
from tests.scenarios.data import Rows
from tests.scenarios.trainers import quiet_trainer, warnings_logged

ROWS, TOKENS, VOCABULARY, CLASSES = 8, 7, 40, 3
LAYOUTS = ((8, 1), (4, 2), (1, 8))
PRECISION = 1e-6
# A layout changes the loss by labels' shares or a factor of 2, if at all; rounding changes it by less than this.
DEPENDS = 1e-4
HEAD_TIMEOUT_SECONDS = 12
# Parameters. The sizes below do not make larger models tiny.
MAX_PARAMETERS = 3_000_000
TASKS = (
    *("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "NEXT_SENTENCE_PREDICTION"),
    *("TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE", "IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION"),
    "PRETRAINING",
)
# Value -> names of settings that have it in a tiny config, in one or another architecture.
SIZES: dict[int, str] = {
    VOCABULARY: "vocab_size",
    64: "max_position_embeddings n_positions",
    32: "intermediate_size ffn_dim d_ff d_inner n_inner hidden_dim encoder_ffn_dim decoder_ffn_dim image_size",
    16: "hidden_size d_model n_embd dim embedding_size emb_dim model_dim moe_intermediate_size "
    "shared_expert_intermediate_size",
    8: "head_dim d_kv patch_size state_size mamba_d_state kv_lora_rank q_lora_rank v_head_dim",
    4: "num_experts num_local_experts n_routed_experts qk_rope_head_dim qk_nope_head_dim",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_key_value_heads num_experts_per_tok type_vocab_size eos_token_id",
    1: "bos_token_id",
    0: "pad_token_id decoder_start_token_id",
}
SETTINGS = {name: size for size, names in SIZES.items() for name in names.split()}
# Heads that classify each token as replaced or original.
TOKEN_DETECTION_HEADS = ("ElectraForPreTraining", "FunnelForPreTraining")
# Some heads of each task, of both kinds: with and without division.
SAMPLE = (
    *("BertLMHeadModel", "GPT2LMHeadModel", "LlamaForCausalLM", "OPTForCausalLM", "XLNetLMHeadModel"),
    *("MixtralForCausalLM", "BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM", "ModernBertForMaskedLM"),
    *("T5ForConditionalGeneration", "BartForConditionalGeneration", "MarianMTModel"),
    *("BertForSequenceClassification", "DebertaV2ForSequenceClassification", "LlamaForSequenceClassification"),
    *("ModernBertForSequenceClassification", "GPT2ForSequenceClassification", "BertForNextSentencePrediction"),
    *("BertForTokenClassification", "LlamaForTokenClassification", "DebertaForTokenClassification"),
    *("BertForQuestionAnswering", "LlamaForQuestionAnswering", "DistilBertForQuestionAnswering"),
    *("BertForMultipleChoice", "ViTForImageClassification", "BeitForImageClassification"),
    *("SegformerForSemanticSegmentation", "BertForPreTraining"),
)


@dataclass
class Outcome:
    """The result for a head.

    Parameters:
        ratio: how much the loss changes at most between layouts with "transformers", as the larger over the smaller.
        is_warned: there was a warning then.
        exact_loss, exact_gradient: the same ratios with "exact", of the loss and of the norm of the gradients.
        warns_of_unknown_reduction: with "exact" there was a warning that the head is of neither kind.
        reason: why layouts differ anyway, if the model says so.
        precision: how much layouts may differ, which is more in single precision.
    """

    name: str
    ratio: float
    is_warned: bool
    exact_loss: float
    exact_gradient: float
    warns_of_unknown_reduction: bool
    reason: str | None
    precision: float = PRECISION

    @property
    def depends(self) -> bool:
        return not self.ratio < 1 + DEPENDS

    @property
    def is_exact(self) -> bool:
        return max(self.exact_loss, self.exact_gradient) < 1 + self.precision

    @property
    def fault(self) -> str | None:
        """Return what is wrong, or None."""
        if not (self.is_exact or self.warns_of_unknown_reduction or self.reason):
            return f"{self.name}: exact loss {self.exact_loss:.7f}, gradients {self.exact_gradient:.7f}"
        if self.reason is None and self.depends is not self.is_warned:
            return f"{self.name}: ratio {self.ratio:.5f}, {'' if self.is_warned else 'not '}warned about"
        return None


def heads() -> dict[str, str]:
    """Names of heads, each with the first task that it is listed under."""
    results: dict[str, str] = {}
    for task in TASKS:
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for listed in names.values():
            for name in listed if isinstance(listed, tuple | list) else [listed]:
                results.setdefault(name, task)
    return results


def built(name: str, task: str) -> Any:
    """A tiny model without dropout."""
    kind = getattr(transformers, name)
    base = kind.config_class()
    settings = {key: value for key, value in SETTINGS.items() if hasattr(base, key)}
    settings["num_labels"] = 2 if task == "QUESTION_ANSWERING" else CLASSES
    if getattr(base, "is_encoder_decoder", False):
        settings["decoder_start_token_id"] = 0
    try:
        config = kind.config_class(**settings)
    except Exception:
        config = base
        for key, value in settings.items():
            with contextlib.suppress(Exception):
                setattr(config, key, value)
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))):
        for key, value in list(vars(part).items()):
            if isinstance(value, float) and ("drop" in key or "jitter" in key):
                setattr(part, key, 0.0)
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size} parameters")
    return kind(config).train()


def rows_for(task: str, model: Any) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (ROWS, TOKENS), generator=draw)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    classes = torch.randint(0, CLASSES, (ROWS,), generator=draw)
    labels = ids % CLASSES if task == "TOKEN_CLASSIFICATION" else ids.clone()
    for row in range(ROWS):
        labels[row, : row % 5] = -100
    if task in ("IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION"):
        size = getattr(model.config, "image_size", 32)
        size = size if isinstance(size, int) else 32
        channels = getattr(model.config, "num_channels", 3)
        batch = {"pixel_values": torch.randn(ROWS, channels, size, size, generator=draw), "labels": classes}
        if task == "SEMANTIC_SEGMENTATION":
            batch["labels"] = torch.randint(0, CLASSES, (ROWS, size, size), generator=draw)
    elif task == "QUESTION_ANSWERING":
        batch |= {"start_positions": classes, "end_positions": classes + 2}
    elif task == "MULTIPLE_CHOICE":
        pairs = {name: torch.stack([value, value.flip(1)], 1) for name, value in batch.items()}
        batch = {**pairs, "labels": classes % 2}
    elif task == "NEXT_SENTENCE_PREDICTION":
        batch["labels"] = classes % 2
    elif task == "SEQUENCE_CLASSIFICATION":
        batch["labels"] = classes
    elif type(model).__name__ in TOKEN_DETECTION_HEADS:
        batch["labels"] = ids % 2
    else:
        batch["labels"] = labels
        for name, value in (("next_sentence_label", classes % 2), ("sentence_order_label", classes % 2)):
            if name in inspect.signature(model.forward).parameters:
                batch[name] = value
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        batch.pop("attention_mask", None)
    return [{name: value[row] for name, value in batch.items()} for row in range(ROWS)]


def reason_of(model: Any) -> str | None:
    """Why a model's outputs depend on the other rows of a micro-batch, or on chance."""
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return "batch normalization"
    weights = [value for key, value in vars(model.config).items() if "aux_loss" in key or "router_z_loss" in key]
    if getattr(model.config, "output_router_logits", False) and any(weights):
        return "load balancing of experts over the batch"
    return None


def step(model: Any, rows: list[Any], layout: tuple[int, int], normalization: str) -> tuple[float, float, list[str]]:
    """Loss, norm of the gradients and warnings of an optimizer step."""
    settings = {
        "per_device_train_batch_size": layout[0],
        "gradient_accumulation_steps": layout[1],
        "max_steps": 1,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "learning_rate": 0.0,
        "optim": "sgd",
        "max_grad_norm": 1.0,
        "loss_normalization": normalization,
        "train_sampling_strategy": "sequential",
    }
    with tempfile.TemporaryDirectory() as folder, warnings_logged("loss_normalization") as texts:
        torch.manual_seed(0)
        random.seed(0)
        trainer = quiet_trainer(folder, model, trainer_kwargs={"train_dataset": Rows(rows)}, **settings)
        trainer.remove_callback(PrinterCallback)
        results: list[tuple[float, float]] = []
        # With its digits: what is logged is the same, rounded for people.
        norm = trainer._get_grad_norm
        trainer._get_grad_norm = lambda *args, **kwargs: (
            results.append((trainer._tr_loss.item(), _norm(model))) or norm(*args, **kwargs)
        )
        trainer.train()
    return *results[0], texts


def _norm(model: Any) -> float:
    parts = [parameter.grad.double().norm() for parameter in model.parameters() if parameter.grad is not None]
    return torch.stack(parts).norm().item()


def ratio(values: list[float]) -> float:
    return max(values) / min(values) if min(values) else math.inf if max(values) else 1.0


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def loss_of(model: Any, rows: list[Any]) -> Any:
    for row in rows:
        row.update({key: value.to(model.dtype) for key, value in row.items() if value.is_floating_point()})
    return getattr(model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}), "loss", None)


def tried(name: str, task: str) -> Outcome | str:
    """Return the result for a head, or why it cannot be built or trained from a tiny config."""
    results = tried_in(torch.float64, PRECISION, name, task)
    # Some take no double precision, or have numbers in them that are right for single precision.
    return results if isinstance(results, Outcome) else tried_in(torch.float32, 10 * PRECISION, name, task)


def tried_in(dtype: torch.dtype, precision: float, name: str, task: str) -> Outcome | str:
    try:
        with limited(HEAD_TIMEOUT_SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = built(name, task).to(dtype)
            rows = rows_for(task, model)
            if loss_of(model, rows) is None:
                return "no loss"
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0][:100]
    try:
        by_layout = [step(model, rows, layout, "transformers") for layout in LAYOUTS]
        exact = [step(model, rows, layout, "exact") for layout in LAYOUTS]
    except ValueError as error:
        # Batch normalization has nothing to normalize in a single row.
        return f"one row at a time: {error}"[:100]
    if any(math.isnan(norm) for _, norm, _ in (*by_layout, *exact)):
        return "gradients are nan"
    return Outcome(
        name,
        ratio([loss for loss, _, _ in by_layout]),
        any(texts for _, _, texts in by_layout),
        ratio([loss for loss, _, _ in exact]),
        ratio([norm for _, norm, _ in exact]),
        any("neither a mean" in text for _, _, texts in exact for text in texts),
        reason_of(model),
        precision,
    )


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    # Not by its verbosity, which littrainer follows: its warnings are what is looked for.
    transformers.logging.disable_default_handler()
    began, listed = time.monotonic(), heads()
    outcomes: list[Outcome] = []
    not_built: dict[str, str] = {}
    for number, name in enumerate(names or listed):
        results = tried(name, listed[name])
        if isinstance(results, Outcome):
            outcomes.append(results)
            if results.fault:
                print("FAULT", results.fault, flush=True)
        else:
            not_built[name] = results
        if number % 50 == 49:
            print(f"{number + 1} of {len(names or listed)}, {time.monotonic() - began:.0f} s", flush=True)
    exact = [outcome for outcome in outcomes if outcome.is_exact]
    print(f"{len(outcomes)} heads ({len(not_built)} cannot be built from a tiny config)")
    depending, warned = sum(outcome.depends for outcome in outcomes), sum(outcome.is_warned for outcome in outcomes)
    print(f"transformers: {depending} depend on the layout, {warned} warnings")
    print(f"exact: {len(exact)} equal in all layouts to {PRECISION:g}")
    reasons = collections.defaultdict(list)
    for outcome in outcomes:
        if not outcome.is_exact:
            reasons[
                outcome.reason or ("told to be of neither kind" if outcome.warns_of_unknown_reduction else "FAULT")
            ].append(outcome.name)
    for reason, those in reasons.items():
        print(f"{reason}: {', '.join(those)}")
    for outcome in outcomes if names else ():
        print(outcome)
    for name, why in not_built.items():
        print(f"{name}: {why}")
    return int(any(outcome.fault for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
