"""Tiny models: plain torch modules, and transformers models built from a config."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY_SIZE = 40
FEATURES = 6
CLASSES = 3
END_TOKEN = 2
"""What the sequences end with that T5 and BART below are to learn."""


class VectorClassifier(nn.Module):
    """A two-layer classifier over float vectors that returns a dictionary and takes no further keywords."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, CLASSES)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.relu(self.inner(x))))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.logits(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class TupleClassifier(VectorClassifier):
    """Returns `(loss, logits)`, or `(logits,)` where there are no labels."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.logits(x)
        if labels is None:
            return (logits,)
        return nn.functional.cross_entropy(logits, labels), logits


class KeywordClassifier(VectorClassifier):
    """Accepts any keyword, `num_items_in_batch` among them, and ignores it."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(x, labels)


class CountingClassifier(VectorClassifier):
    """Divides its summed loss by the number of items of the whole optimizer step if it receives that number."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        logits = self.logits(x)
        if labels is None:
            return {"logits": logits}
        count = kwargs.get("num_items_in_batch")
        if count is None:
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels, reduction="sum") / count, "logits": logits}


class NoisyClassifier(VectorClassifier):
    """Batch normalisation and dropout: its numbers depend on the mode (train or eval) and on the random draws."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.batch_norm = nn.BatchNorm1d(hidden)
        self.dropout = nn.Dropout(0.3)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.batch_norm(torch.relu(self.inner(x)))))


class PartlyTrainedClassifier(VectorClassifier):
    """A model with a frozen layer and a layer outside of the forward pass, which never has a gradient."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.unused = nn.Linear(hidden, hidden)
        self.inner.requires_grad_(False)


class RememberingClassifier(VectorClassifier):
    """Keeps the mean of each batch in a buffer that grows, scales its logits by it, and loads it itself."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.register_buffer("means", torch.zeros(0))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.means = torch.cat([self.means, x.mean().detach().reshape(1)])
        return super().logits(x) * (1 + self.means.sum())

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.means = torch.zeros_like(state_dict["means"])
        return super().load_state_dict(state_dict, strict, assign)


class NonfiniteClassifier(VectorClassifier):
    """A model whose loss is NaN on the training micro-batches (counted from 0) named in `broken`."""

    def __init__(self, broken: tuple[int, ...], value: float = float("nan")) -> None:
        super().__init__()
        self.broken = broken
        self.value = value
        self.micro_batches = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = super().forward(x, labels)
        if self.training:
            if self.micro_batches in self.broken:
                # The NaN replaces the value and not the gradient, so that weights stay finite.
                loss = outputs["loss"]
                outputs["loss"] = loss - loss.detach() + self.value
            self.micro_batches += 1
        return outputs


class LosslessClassifier(VectorClassifier):
    """Returns logits only."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return {"logits": self.logits(x)}


class LogitsOnly(nn.Module):
    """Takes no labels at all: the loss has to come from the Trainer's side."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        return {"logits": self.head(x)}


def tiny_bert_config(**changes: Any) -> Any:
    """A BERT of a single layer with dropout switched on."""
    from transformers import BertConfig

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "num_labels": CLASSES,
    }
    return BertConfig(**{**settings, **changes})


def tiny_bert_classifier(**changes: Any) -> Any:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(tiny_bert_config(**changes))


def tiny_bert_tagger(**changes: Any) -> Any:
    from transformers import BertForTokenClassification

    return BertForTokenClassification(tiny_bert_config(**changes))


def tiny_bert_for_masked_tokens(**changes: Any) -> Any:
    from transformers import BertForMaskedLM

    return BertForMaskedLM(tiny_bert_config(**changes))


def tiny_gpt2(**changes: Any) -> Any:
    """A GPT-2 of a single layer with dropout; its loss takes `num_items_in_batch`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return GPT2LMHeadModel(GPT2Config(**{**settings, **changes}))


def tiny_llama(**changes: Any) -> Any:
    """A Llama of a single layer; unlike GPT-2's, its class name says that its loss shifts the labels by a position."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


def tiny_t5(**changes: Any) -> Any:
    """A T5 of a single layer with dropout. Large random weights make its generated texts end early and vary."""
    from transformers import T5Config, T5ForConditionalGeneration

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 1,
        "num_heads": 2,
        "dropout_rate": 0.1,
        "initializer_factor": 3.0,
        "pad_token_id": 0,
        "eos_token_id": END_TOKEN,
        "decoder_start_token_id": 0,
    }
    return T5ForConditionalGeneration(T5Config(**{**settings, **changes}))


def tiny_bart(**changes: Any) -> Any:
    """A BART of an encoder layer and a decoder layer, with dropout; its weights are drawn wide, as T5's."""
    from transformers import BartConfig, BartForConditionalGeneration

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 32,
        "init_std": 0.5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": END_TOKEN,
        "decoder_start_token_id": END_TOKEN,
        "forced_eos_token_id": END_TOKEN,
    }
    return BartForConditionalGeneration(BartConfig(**{**settings, **changes}))


def tiny_lora_tagger(adapters: tuple[str, ...] = ("default",)) -> Any:
    """A BERT whose attention is adapted with low rank, and whose new classifier is trained and saved as a whole.

    Parameters:
        adapters: names of the adapters; the first is trained.
    """
    import peft

    def adapter() -> Any:
        return peft.LoraConfig(
            r=2, target_modules=["query"], lora_dropout=0.1, modules_to_save=["classifier"], task_type="TOKEN_CLS"
        )

    model = peft.get_peft_model(tiny_bert_tagger(), adapter(), adapter_name=adapters[0])
    for name in adapters[1:]:
        model.add_adapter(name, adapter())
    return model
