"""A small BART translates the messages of programs, such as "file not found", into another language.

The sentences and their translations are in the message catalogues that the programs on this machine have brought
along. Where there are hardly any for the language, the model learns to write Korean syllables instead, from how they
are spelled in Latin letters. It is trained from scratch; its translations are scored by the characters that they share
with the right ones (as chrF does) and by how many are right altogether, and compared with leaving the English text.

    python examples/translation.py
    littrainer run examples/translation.py --language de

The same script prints the same numbers on both sides; `littrainer run` trains on Lightning. Every training argument is
an option, as in `--max_steps 20 --generation_num_beams 4`.
"""

from collections import Counter
from dataclasses import dataclass, field

import datasets
import numpy as np
from datasets import Dataset
from local_texts import read_translations, romanised_syllables
from small_tokenizers import train_byte_level_bpe
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
    "output_dir": "runs/translation",
    "num_train_epochs": 3,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 128,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 50,
    "logging_steps": 50,
    "eval_strategy": "no",
    "save_strategy": "no",
    "predict_with_generate": True,
    "dataloader_pin_memory": False,
    "seed": 0,
    "report_to": "none",
}
FEWEST_MESSAGES = 2000


@dataclass
class Options:
    language: str = field(default="uk", metadata={"help": "as the folders of /usr/share/locale are called"})
    messages: int = field(default=7000, metadata={"help": "to train on at most"})
    test_messages: int = field(default=400, metadata={"help": "to test on"})
    characters: int = field(default=20, metadata={"help": "of an English message at most"})
    vocabulary: int = field(default=1500, metadata={"help": "tokens at most"})


def load_messages(options, seed):
    """Where the messages are from, and rows to train and to test on."""
    found = read_translations(options.language, max_characters=options.characters)
    if len(found.pairs) < FEWEST_MESSAGES:
        found = romanised_syllables()
    rows = Dataset.from_list([{"english": english, "other": other} for english, other in found.pairs])
    rows = rows.shuffle(seed=seed).select(range(min(len(rows), options.messages + options.test_messages)))
    return found.source, rows.train_test_split(test_size=options.test_messages, shuffle=False)


def shared_characters(written, right, longest=3):
    """How far two texts have their runs of one, two and three characters in common, between 0 and 1."""
    shares = []
    for length in range(1, longest + 1):
        written_runs, right_runs = (
            Counter(text[start : start + length] for start in range(len(text) - length + 1))
            for text in (written, right)
        )
        both = (written_runs & right_runs).total()
        shares.append(2 * both / max(written_runs.total() + right_runs.total(), 1))
    return sum(shares) / longest


def scores(written, right):
    pairs = list(zip(written, right, strict=True))
    return {
        "chrf": float(np.mean([shared_characters(*pair) for pair in pairs])),
        "exact": float(np.mean([one == other for one, other in pairs])),
    }


def main():
    parser = HfArgumentParser((Options, Seq2SeqTrainingArguments), description=__doc__.splitlines()[0])
    parser.set_defaults(**DEFAULTS)
    options, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    datasets.disable_progress_bars()

    source, messages = load_messages(options, args.seed)
    print(f"{source}: {len(messages['train'])} messages to train on, {len(messages['test'])} to test on")
    texts = [text for row in messages["train"] for text in row.values()]
    tokenizer = train_byte_level_bpe(texts, options.vocabulary, max_tokens=32, ends_texts=True)
    args.generation_max_length = tokenizer.model_max_length

    def tokenize(rows):
        return tokenizer(rows["english"], text_target=rows["other"], truncation=True)

    tokens = messages.map(tokenize, batched=True, remove_columns=messages["train"].column_names)
    model = BartForConditionalGeneration(
        BartConfig(
            vocab_size=len(tokenizer),
            d_model=96,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=192,
            decoder_ffn_dim=192,
            max_position_embeddings=tokenizer.model_max_length,
            init_std=0.1,  # the default of 0.02 is for wide layers
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.eos_token_id,
        )
    )

    def decoded(rows):
        # Rows are filled up with -100, which is no token.
        rows = np.where(rows == -100, tokenizer.pad_token_id, rows)
        return tokenizer.batch_decode(rows, skip_special_tokens=True)

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
    translations = decoded(trainer.predict(tokens["test"]).predictions)

    english, right = messages["test"]["english"], messages["test"]["other"]
    for row in list(zip(english, translations, right, strict=True))[:8]:
        print("\n{}\n  written: {}\n  right:   {}".format(*row))
    copied, ours = scores(english, right), scores(translations, right)
    print(f"\n{'':20}characters  exact")
    print(f"{'left in English':20}{copied['chrf']:10.3f}{copied['exact']:7.3f}")
    print(f"{'this model':20}{ours['chrf']:10.3f}{ours['exact']:7.3f}")
    print(f"\nmodel:  {args.output_dir} (load it with AutoModelForSeq2SeqLM.from_pretrained)")
    print(f"charts: littrainer report {args.output_dir}")


if __name__ == "__main__":
    main()
