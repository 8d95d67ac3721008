"""A small ModernBERT that learns to fill in masked words of Python's reference manual.

An ordinary transformers script that needs no network. It learns a WordPiece vocabulary from the manual, which the
standard library carries for `help()`, trains from scratch on masked tokens, and compares how many it gets right in
paragraphs that it has not seen with answering the most frequent token every time. It ends with a sentence that it fills
in.

    python examples/masked_language_model.py
    littrainer run examples/masked_language_model.py

Both lines print the same numbers; the second one trains on Lightning. Every training argument is an option, as in
`--max_steps 20 --learning_rate 1e-3`; `--whole_words true` masks whole words instead of single tokens.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

import datasets
import torch
from datasets import Dataset
from local_texts import read_prose
from small_tokenizers import train_wordpiece
from transformers import (
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

DEFAULTS = {
    "output_dir": "runs/masked_language_model",
    "num_train_epochs": 10,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 64,
    "learning_rate": 3e-3,
    "warmup_steps": 50,
    "logging_steps": 50,
    "eval_strategy": "epoch",
    "save_strategy": "no",
    # Whole words are known by the positions of their characters, a column that the collator reads, not the model.
    "remove_unused_columns": False,
    "dataloader_pin_memory": False,
    "seed": 0,
    "report_to": "none",
}


@dataclass
class Options:
    vocabulary: int = field(default=1500, metadata={"help": "tokens at most"})
    max_tokens: int = field(default=64, metadata={"help": "of a paragraph; the rest of it is left out"})
    mask: float = field(default=0.2, metadata={"help": "share of the tokens that are to be predicted"})
    whole_words: bool = field(default=False, metadata={"help": "whether all tokens of a word are masked together"})
    sentence: str = field(
        default="If the [MASK] is not found, an exception is raised.", metadata={"help": "what is filled in at the end"}
    )


def load_paragraphs(seed):
    """Paragraphs of the manual, nine to one for training and evaluation."""
    paragraphs = dict.fromkeys(chain.from_iterable(texts for _, texts in read_prose()))
    return Dataset.from_dict({"text": list(paragraphs)}).train_test_split(test_size=0.1, seed=seed)


def fill_in(model, tokenizer, sentence, count=5):
    """The likeliest tokens for the mask in a sentence, with their probabilities."""
    model.eval()
    inputs = tokenizer(sentence, return_tensors="pt").to(model.device)
    place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    with torch.no_grad():
        probabilities = model(**inputs).logits[0, place].softmax(dim=-1)
    best = probabilities.topk(count)
    return list(zip(tokenizer.convert_ids_to_tokens(best.indices.tolist()), best.values.tolist(), strict=True))


def main():
    parser = HfArgumentParser((Options, TrainingArguments), description=__doc__.splitlines()[0])
    parser.set_defaults(**DEFAULTS)
    options, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    datasets.disable_progress_bars()

    paragraphs = load_paragraphs(args.seed)
    tokenizer = train_wordpiece(paragraphs["train"]["text"], options.vocabulary, options.max_tokens)

    def tokenize(rows):
        return tokenizer(
            rows["text"],
            truncation=True,
            # The collator pads everything except positions of characters.
            padding="max_length" if options.whole_words else False,
            return_special_tokens_mask=True,
            return_offsets_mapping=options.whole_words,
        )

    tokens = paragraphs.map(tokenize, batched=True, remove_columns="text")
    print(f"{len(tokens['train'])} paragraphs to train on, {len(tokens['test'])} to evaluate on")
    counts = Counter(chain.from_iterable(row[1:-1] for row in tokens["train"]["input_ids"]))
    ((most_frequent, _),) = counts.most_common(1)

    def compute_metrics(prediction):
        masked = prediction.label_ids != -100
        expected = prediction.label_ids[masked]
        return {
            "accuracy": float((prediction.predictions[masked] == expected).mean()),
            "most_frequent_accuracy": float((most_frequent == expected).mean()),
        }

    config = ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        initializer_range=0.1,  # the usual 0.02 suits layers that are eight times as wide
        max_position_embeddings=options.max_tokens,
        pad_token_id=tokenizer.pad_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
        bos_token_id=None,
        eos_token_id=None,
    )
    trainer = Trainer(
        model=ModernBertForMaskedLM(config),
        args=args,
        train_dataset=tokens["train"],
        eval_dataset=tokens["test"],
        data_collator=DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=options.mask, whole_word_mask=options.whole_words
        ),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
        # An evaluation keeps one number for each token instead of one for each token and each entry of the vocabulary.
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()

    print(f"\n{'':22}accuracy at masked tokens")
    print(f"{'most frequent token':22}{metrics['eval_most_frequent_accuracy']:8.3f}")
    print(f"{'this model':22}{metrics['eval_accuracy']:8.3f}")
    print(f"\n{options.sentence}")
    for token, probability in fill_in(trainer.model, tokenizer, options.sentence):
        print(f"{probability:8.3f}  {token}")
    print(f"\nmodel:  {args.output_dir} (load it with AutoModelForMaskedLM.from_pretrained)")
    print(f"charts: littrainer report {args.output_dir}")


if __name__ == "__main__":
    main()
