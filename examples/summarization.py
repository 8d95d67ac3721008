"""A small BART writes the first line of a docstring from the rest of it, and from what it documents.

The docstrings are those of the standard library on this machine: their first paragraph is the summary that is asked
for, the signature and the other paragraphs are what it is written from. The model is trained from scratch; its
summaries are scored by the words that they share with the right ones (ROUGE-1 and ROUGE-2, as F1), and compared with
the usual baseline of taking the beginning of the text.

    python examples/summarization.py
    littrainer run examples/summarization.py

Both lines print the same numbers; the second one trains on Lightning. Every training argument is an option, as in
`--max_steps 20 --generation_num_beams 4`.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

import datasets
import numpy as np
from datasets import Dataset
from local_texts import read_documentation
from small_tokenizers import train_wordpiece
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

DEFAULTS = {
    "output_dir": "runs/summarization",
    "num_train_epochs": 8,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 50,
    "logging_steps": 20,
    "eval_strategy": "no",
    "save_strategy": "no",
    "predict_with_generate": True,
    "dataloader_pin_memory": False,
    "seed": 0,
    "report_to": "none",
}


@dataclass
class Options:
    docstrings: int = field(default=3000, metadata={"help": "to read at most, a fifth of them to test on"})
    vocabulary: int = field(default=3000, metadata={"help": "tokens at most"})
    source_tokens: int = field(default=32, metadata={"help": "of signature and body that the model reads"})
    summary_tokens: int = field(default=20, metadata={"help": "that it writes at most"})


def load_documents(most, seed):
    """Training and test rows, four to one, with the text to read and the summary to write."""
    summary_of = {}
    for entry in read_documentation():
        if len(entry.body) >= 40 and 3 <= len(entry.summary.split()) <= 16:
            summary_of.setdefault((entry.signature, entry.body), entry.summary)
    rows = [
        {"signature": signature, "body": body, "summary": summary} for (signature, body), summary in summary_of.items()
    ]
    return Dataset.from_list(rows[:most]).train_test_split(test_size=0.2, seed=seed)


def shared_f1(written, right, length):
    """ROUGE-N: how far two texts have their runs of `length` words in common, between 0 and 1."""

    def runs(text):
        words = re.findall(r"\w+", text.lower())
        return Counter(tuple(words[start : start + length]) for start in range(len(words) - length + 1))

    written_runs, right_runs = runs(written), runs(right)
    both = (written_runs & right_runs).total()
    return 2 * both / max(written_runs.total() + right_runs.total(), 1)


def scores(written, right):
    pairs = list(zip(written, right, strict=True))
    return {f"rouge{length}": float(np.mean([shared_f1(*pair, length) for pair in pairs])) for length in (1, 2)}


def main():
    parser = HfArgumentParser((Options, Seq2SeqTrainingArguments), description=__doc__.splitlines()[0])
    parser.set_defaults(**DEFAULTS)
    options, args = parser.parse_args_into_dataclasses()
    args.generation_max_length = options.summary_tokens
    set_seed(args.seed)
    datasets.disable_progress_bars()

    documents = load_documents(options.docstrings, args.seed)
    print(f"{len(documents['train'])} docstrings to train on, {len(documents['test'])} to test on")
    texts = [text for row in documents["train"] for text in (row["signature"], row["body"], row["summary"])]
    # It splits set_timeout into words, which are the tokens of the same words in a sentence.
    tokenizer = train_wordpiece(texts, options.vocabulary, options.source_tokens)

    def tokenize(rows):
        sources = [f"{name}: {body}" for name, body in zip(rows["signature"], rows["body"], strict=True)]
        inputs = tokenizer(sources, truncation=True)
        summaries = tokenizer(text_target=rows["summary"], truncation=True, max_length=options.summary_tokens)
        return {**inputs, "labels": summaries["input_ids"]}

    tokens = documents.map(tokenize, batched=True, remove_columns=documents["train"].column_names)
    model = BartForConditionalGeneration(
        BartConfig(
            vocab_size=len(tokenizer),
            d_model=96,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=192,
            decoder_ffn_dim=192,
            max_position_embeddings=options.source_tokens,
            init_std=0.1,  # the default of 0.02 is for wide layers
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.cls_token_id,
            eos_token_id=tokenizer.sep_token_id,
            decoder_start_token_id=tokenizer.sep_token_id,
        )
    )

    # Without this a model that has seen so little likes to say a word again and again.
    model.generation_config.no_repeat_ngram_size = 2

    def decoded(rows):
        # Rows are filled up with -100, which is no token.
        rows = np.where(rows == -100, tokenizer.pad_token_id, rows)
        return [text.strip() for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]

    def compute_metrics(prediction):
        return scores(decoded(prediction.predictions), decoded(prediction.label_ids))

    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=tokens["train"],
        eval_dataset=tokens["test"],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    summaries = decoded(trainer.predict(tokens["test"]).predictions)

    right = documents["test"]["summary"]
    for signature, summary, wanted in list(zip(documents["test"]["signature"], summaries, right, strict=True))[:5]:
        print(f"\n{signature}\n  written: {summary}\n  right:   {wanted}")
    # As many words as a summary has on average.
    words = round(np.mean([len(text.split()) for text in documents["train"]["summary"]]))
    lead = scores([" ".join(body.split()[:words]) for body in documents["test"]["body"]], right)
    ours = scores(summaries, right)
    print(f"\n{'':24}ROUGE-1  ROUGE-2")
    print(f"{'beginning of the text':24}{lead['rouge1']:7.3f}{lead['rouge2']:9.3f}")
    print(f"{'this model':24}{ours['rouge1']:7.3f}{ours['rouge2']:9.3f}")
    print(f"\nmodel:  {args.output_dir} (load it with AutoModelForSeq2SeqLM.from_pretrained)")
    print(f"charts: littrainer report {args.output_dir}")


if __name__ == "__main__":
    main()
