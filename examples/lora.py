"""LoRA with PEFT: a language model that knows prose learns to write Python, by small adapters beside its weights.

First a small Llama is trained from scratch on Python's reference manual, as prose that `help()` shows; this stands for
the pretrained model that one would download. Then its weights are frozen, and adapters of low rank learn the source
code of the standard library. Their perplexity on source code that they have not seen is compared with that of the
model without them. The adapters are saved, loaded onto the first model again, and merged into its weights.

    python examples/lora.py
    littrainer run examples/lora.py

Both lines print the same numbers; the second one trains on Lightning. Every training argument is an option, and holds
for the adapters. Needs peft.
"""

import math
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import datasets
import torch
from datasets import Dataset
from local_texts import read_prose, read_sources
from peft import LoraConfig, PeftModel, get_peft_model
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
    "output_dir": "runs/lora",
    "max_steps": 200,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 32,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "logging_steps": 20,
    "eval_strategy": "no",
    "save_strategy": "no",
    "dataloader_pin_memory": False,
    "seed": 0,
    "report_to": "none",
}
BLOCK_TOKENS = 64


@dataclass
class Options:
    pretraining_steps: int = field(default=200, metadata={"help": "of the model that the adapters belong to"})
    characters: int = field(default=300_000, metadata={"help": "of prose, and of source code, to read at most"})
    vocabulary: int = field(default=1000, metadata={"help": "tokens at most"})
    rank: int = field(default=8, metadata={"help": "of the adapters"})


def load_texts(characters):
    """Prose and source code in pieces, each with at most so many characters in all."""
    prose = [paragraph for _, paragraphs in read_prose() for paragraph in paragraphs]
    code = [text for _, text in read_sources() if len(text) < 40_000]
    return up_to(prose, characters), up_to(code, characters)


def up_to(texts, characters):
    chosen = []
    for text in texts:
        if characters <= 0:
            break
        chosen.append(text[:characters])
        characters -= len(text)
    return chosen


def blocks_of(texts, tokenizer):
    """All texts as one row of tokens, cut into blocks."""
    rows = tokenizer(texts, verbose=False)["input_ids"]
    tokens = list(chain.from_iterable([*row, tokenizer.eos_token_id] for row in rows))
    starts = range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS)
    return Dataset.from_dict({"input_ids": [tokens[start : start + BLOCK_TOKENS] for start in starts]})


def trained_on_prose(prose, tokenizer, options, args):
    """A Llama of two layers, trained from scratch, in the folder that is returned."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=BLOCK_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    folder = Path(args.output_dir) / "base"
    first_args = TrainingArguments(
        output_dir=folder,
        max_steps=options.pretraining_steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        logging_steps=args.logging_steps,
        save_strategy="no",
        dataloader_pin_memory=False,
        disable_tqdm=args.disable_tqdm,
        use_cpu=args.use_cpu,
        seed=args.seed,
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=first_args,
        train_dataset=prose,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    return folder


def largest_difference(one, other, rows):
    """Between the logits of two models on the same rows."""
    tokens = torch.tensor(rows)
    with torch.no_grad():
        logits = [model.eval()(input_ids=tokens.to(model.device)).logits.cpu() for model in (one, other)]
    return float((logits[0] - logits[1]).abs().max())


def main():
    parser = HfArgumentParser((Options, TrainingArguments), description=__doc__.splitlines()[0])
    parser.set_defaults(**DEFAULTS)
    options, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    datasets.disable_progress_bars()

    prose, code = load_texts(options.characters)
    tokenizer = train_byte_level_bpe([*prose, *code], options.vocabulary)
    code = blocks_of(code, tokenizer).train_test_split(test_size=0.1, seed=args.seed)
    print(f"{len(code['train'])} blocks of source code to train on, {len(code['test'])} to test on")
    base = trained_on_prose(blocks_of(prose, tokenizer), tokenizer, options, args)

    model = get_peft_model(
        LlamaForCausalLM.from_pretrained(base),
        LoraConfig(
            task_type="CAUSAL_LM",
            r=options.rank,
            lora_alpha=2 * options.rank,
            target_modules="all-linear",  # but the one at the end of the model
        ),
    )
    trained, total = model.get_nb_trainable_parameters()
    print(f"\nparameters: {total}, of which the adapters have {trained} ({trained / total:.1%}), which are trained")
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=code["train"],
        eval_dataset=code["test"],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    # An adapter begins with a product that is zero: before training this is the model without it.
    before = math.exp(trainer.evaluate()["eval_loss"])
    trainer.train()
    after = math.exp(trainer.evaluate()["eval_loss"])
    trainer.save_model()
    trainer.save_state()

    # What another program would do with the two folders.
    loaded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), args.output_dir)
    rows = code["test"]["input_ids"][:8]
    print(f"\nloaded again, the adapters' logits differ by at most {largest_difference(model, loaded, rows):.1e}")
    merged = loaded.merge_and_unload()
    print(f"merged into the weights, by at most {largest_difference(model, merged, rows):.1e}")
    merged.save_pretrained(Path(args.output_dir) / "merged")
    tokenizer.save_pretrained(Path(args.output_dir) / "merged")

    print(f"\n{'':22}perplexity of source code")
    print(f"{'without the adapters':22}{before:10.1f}")
    print(f"{'with the adapters':22}{after:10.1f}")
    print(f"\nadapters: {args.output_dir} (load them with peft.PeftModel.from_pretrained)")
    print(f"merged:   {args.output_dir}/merged (load it with AutoModelForCausalLM.from_pretrained)")
    print(f"charts:   littrainer report {args.output_dir} {args.output_dir}/base")


if __name__ == "__main__":
    main()
