"""A small Llama that learns to write Python from the source code of the standard library.

An ordinary transformers script that needs no network. It learns a byte-level BPE vocabulary, packs the source files
into blocks of equal length, trains from scratch, and compares the perplexity on modules that it has not seen with that
of a unigram model, which knows how frequent each token is and nothing of what stands before it. At the end it writes a
text.

    python examples/causal_language_model.py
    littrainer run examples/causal_language_model.py

Both lines print the same numbers; the second one trains on Lightning. Every training argument is an option, as in
`--max_steps 20 --learning_rate 1e-3`.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

import datasets
import torch
from datasets import Dataset
from local_texts import read_sources
from small_tokenizers import train_byte_level_bpe
from transformers import (
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

DEFAULTS = {
    "output_dir": "runs/causal_language_model",
    "max_steps": 320,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 16,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "logging_steps": 20,
    "eval_strategy": "steps",
    "eval_steps": 160,
    "save_strategy": "no",
    "dataloader_pin_memory": False,
    "seed": 0,
    "report_to": "none",
}


@dataclass
class Options:
    characters: int = field(default=1_000_000, metadata={"help": "of source code to read at most"})
    vocabulary: int = field(default=1500, metadata={"help": "tokens at most"})
    block: int = field(default=128, metadata={"help": "tokens that the model sees at once"})
    prompt: str = field(default="def read(self,", metadata={"help": "what the text at the end begins with"})


def choose_sources(characters, seed):
    """Source files for training and for evaluation, one in twelve of them for the latter."""
    sources = [text for _, text in read_sources()]
    random.Random(seed).shuffle(sources)
    chosen, total = [], 0
    for text in sources:
        # One long file would be a large part of what the model learns from.
        if total < characters and len(text) < 40_000:
            chosen.append(text)
            total += len(text)
    held_out = max(1, len(chosen) // 12)
    return chosen[held_out:], chosen[:held_out]


def pack(texts, tokenizer, block):
    """One long row of all tokens, with the end token between texts, cut into blocks."""
    rows = tokenizer(texts, verbose=False)["input_ids"]
    tokens = list(chain.from_iterable([*row, tokenizer.eos_token_id] for row in rows))
    starts = range(0, len(tokens) - block + 1, block)
    return Dataset.from_dict({"input_ids": [tokens[start : start + block] for start in starts]})


def unigram_perplexity(train, evaluation, vocabulary):
    """Perplexity of predicting each token by its share of the training tokens, with one added to every count."""
    counts = Counter(chain.from_iterable(train["input_ids"]))
    total = sum(counts.values()) + vocabulary
    # The first token of a block is not predicted: the model has nothing to predict it from.
    tokens = list(chain.from_iterable(row[1:] for row in evaluation["input_ids"]))
    return math.exp(-sum(math.log((counts[token] + 1) / total) for token in tokens) / len(tokens))


def write_on(model, tokenizer, prompt, new_tokens=80):
    """A text that begins with `prompt`, each token drawn by its probability among the likelier ones."""
    model.eval()
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    with torch.no_grad():
        written = model.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=True, top_p=0.9, temperature=0.8, eos_token_id=None
        )
    return tokenizer.decode(written[0])


def main():
    parser = HfArgumentParser((Options, TrainingArguments), description=__doc__.splitlines()[0])
    parser.set_defaults(**DEFAULTS)
    options, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    datasets.disable_progress_bars()

    train_texts, evaluation_texts = choose_sources(options.characters, args.seed)
    tokenizer = train_byte_level_bpe(train_texts, options.vocabulary)
    train = pack(train_texts, tokenizer, options.block)
    evaluation = pack(evaluation_texts, tokenizer, options.block)
    print(f"{len(train_texts)} modules to train on, {len(evaluation_texts)} to evaluate on")
    print(f"{len(train)} and {len(evaluation)} blocks of {options.block} tokens")

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.08,  # the usual 0.02 suits layers that are many times as wide
        max_position_embeddings=options.block * 2,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()

    print(f"\n{'':18}perplexity of a token")
    print(f"{'unigram model':18}{unigram_perplexity(train, evaluation, len(tokenizer)):10.1f}")
    print(f"{'this model':18}{math.exp(metrics['eval_loss']):10.1f}")
    set_seed(args.seed)  # so that the text depends on the weights alone
    print(f"\n{write_on(trainer.model, tokenizer, options.prompt)}")
    print(f"\nmodel:  {args.output_dir} (load it with AutoModelForCausalLM.from_pretrained)")
    print(f"charts: littrainer report {args.output_dir}")


if __name__ == "__main__":
    main()
