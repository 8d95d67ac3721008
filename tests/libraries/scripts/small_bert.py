"""Small BERT models with a tokenizer, saved as a user's checkpoints, for the scripts in this folder."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, PreTrainedTokenizerFast

WORDS = ["fox", "dog", "lazy", "quick", "capital", "france", "paris", "spider", "legs", "eight", "sea", "wind", "rain"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def sentence(draws: random.Random) -> str:
    """Three to seven words."""
    return " ".join(draws.choices(WORDS, k=draws.randint(3, 7)))


def bert_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each word, and BERT's special tokens around a text or a pair."""
    vocabulary = [*SPECIAL, *WORDS]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(word, vocabulary.index(word)) for word in ("[CLS]", "[SEP]")],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=32, **dict(zip(names, SPECIAL, strict=True))
    )


def write_bert(model_class: type, **settings: object) -> str:
    """Write a model with random weights, and its tokenizer, into a folder whose path is returned."""
    folder = Path("models") / model_class.__name__
    if not folder.exists():
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(SPECIAL) + len(WORDS),
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=40,
            **settings,
        )
        model_class(config).save_pretrained(folder)
        bert_tokenizer().save_pretrained(folder)
    return str(folder)


def copy_parameter_memory(model: torch.nn.Module) -> torch.nn.Module:
    """The model with its parameters moved to memory that torch aligned.

    Parameters read from a safetensors file keep the file's alignment, which changes how a CPU rounds sums: two runs of
    a script would differ.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model
