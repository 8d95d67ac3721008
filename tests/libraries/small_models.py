"""Small models with a tokenizer, and data, written into a folder as a user's own would lie there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "what is the capital of france ? paris is the capital of france .",
    "how many legs has a spider ? a spider has eight legs .",
    "please write a short poem about the sea , the wind and the rain .",
    "user assistant system good bad answer question yes no maybe thank you",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + ' <end>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' <end>' }}{% endif %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def write_models(folder: Path) -> None:
    """Write language models `llama` and `reference`, `reward` with a single output, and the data `chats`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        attention_dropout=0.1,
        **SIZES,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    models = {"llama": LlamaForCausalLM(config), "reference": LlamaForCausalLM(config)}
    config.num_labels = 1
    models["reward"] = LlamaForSequenceClassification(config)
    torch.random.set_rng_state(state)
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for split, number in {"train": 10, "test": 3}.items():
        _write_chats(folder / "chats" / f"{split}.jsonl", number)


def _write_chats(path: Path, number: int) -> None:
    turns = [(TEXT[i % len(TEXT)], TEXT[(i + 1) % len(TEXT)]) for i in range(number)]
    chats = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}
        for asked, answered in turns
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "<end>", "<unk>", "<user>", "<assistant>", "<system>"]
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(TEXT, trainers.WordLevelTrainer(special_tokens=special))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>", "<system>"],
        chat_template=CHAT_TEMPLATE,
    )
