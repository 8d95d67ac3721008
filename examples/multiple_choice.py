"""Which of four sentences of a docstring is the one that it begins with?

An ordinary transformers script that needs no network. A question is a function of the standard library with its
parameters, as in `email.message.Message.get_payload(self, i=None, decode=False)`; the choices are the first paragraph
of its docstring and three sentences from further below. A small BERT is trained from scratch and compared with guessing
and with taking the sentence that shares most words with the question.

    python examples/multiple_choice.py
    littrainer run examples/multiple_choice.py

Both lines print the same numbers; the second one trains on Lightning. Every training argument is an option, as in
`--max_steps 20 --learning_rate 1e-3`.
"""

import random
import re
from dataclasses import dataclass, field

import datasets
import numpy as np
from datasets import Dataset
from local_texts import read_documentation
from small_tokenizers import train_wordpiece
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    DataCollatorForMultipleChoice,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

CHOICES = 4
DEFAULTS = {
    "output_dir": "runs/multiple_choice",
    "num_train_epochs": 5,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 64,
    "learning_rate": 1.5e-3,
    "warmup_steps": 30,
    "logging_steps": 25,
    "eval_strategy": "epoch",
    "save_strategy": "no",
    "dataloader_pin_memory": False,
    "seed": 0,
    "report_to": "none",
}


@dataclass
class Options:
    questions: int = field(default=3000, metadata={"help": "at most, one in five of them for evaluation"})
    vocabulary: int = field(default=3000, metadata={"help": "tokens at most"})
    max_tokens: int = field(default=48, metadata={"help": "of a question with one of its choices"})


# ---------------------------------------------------------------- questions


def load_questions(count, seed):
    """Functions with four sentences each, and which of them comes first; four to one for training and evaluation."""
    draw = random.Random(seed)
    rows = []
    for entry in read_documentation():
        sentences = [entry.summary, *re.split(r"(?<=[.:])\s+", entry.body)]
        summary, *others = (text for text in dict.fromkeys(sentences) if text == entry.summary or len(text) >= 20)
        if entry.signature.endswith(")") and 20 <= len(summary) <= 200 and len(others) >= CHOICES - 1:
            label = draw.randrange(CHOICES)
            choices = draw.sample(others, CHOICES - 1)
            choices.insert(label, summary)
            question = f"{entry.name.rpartition('.')[0]}.{entry.signature}"
            rows.append({"question": question, "choices": choices, "label": label})
    draw.shuffle(rows)
    return Dataset.from_list(rows[:count]).train_test_split(test_size=0.2, seed=seed)


def tokenize(rows, tokenizer):
    """A question is paired with each of its choices; the four token rows stay together as one row of the dataset."""
    questions = [question for question in rows["question"] for _ in range(CHOICES)]
    choices = [choice for row in rows["choices"] for choice in row]
    tokens = tokenizer(questions, choices, truncation=True)
    return {
        name: [values[start : start + CHOICES] for start in range(0, len(values), CHOICES)]
        for name, values in tokens.items()
    }


def most_words_in_common(rows):
    """The accuracy of taking the choice with the largest share of the question's words, the first of equals."""
    hits = 0
    for question, choices, label in zip(rows["question"], rows["choices"], rows["label"], strict=True):
        asked = set(re.findall(r"[a-z]+", question.lower()))
        found = [set(re.findall(r"[a-z]+", choice.lower())) for choice in choices]
        shares = [len(asked & words) / max(len(words), 1) for words in found]
        hits += shares.index(max(shares)) == label
    return hits / len(rows)


# ---------------------------------------------------------------- the run


def main():
    parser = HfArgumentParser((Options, TrainingArguments), description=__doc__.splitlines()[0])
    parser.set_defaults(**DEFAULTS)
    options, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    datasets.disable_progress_bars()

    questions = load_questions(options.questions, args.seed)
    print(f"{len(questions['train'])} functions to train on, {len(questions['test'])} to evaluate on")
    texts = [*questions["train"]["question"], *(text for row in questions["train"]["choices"] for text in row)]
    tokenizer = train_wordpiece(texts, options.vocabulary, options.max_tokens)
    tokens = questions.map(
        tokenize, batched=True, fn_kwargs={"tokenizer": tokenizer}, remove_columns=["question", "choices"]
    )

    def compute_metrics(prediction):
        return {"accuracy": float(np.mean(prediction.predictions.argmax(axis=-1) == prediction.label_ids))}

    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        initializer_range=0.12,  # the usual 0.02 suits layers that are twelve times as wide
        max_position_embeddings=options.max_tokens,
        pad_token_id=tokenizer.pad_token_id,
    )
    trainer = Trainer(
        model=BertForMultipleChoice(config),
        args=args,
        train_dataset=tokens["train"],
        eval_dataset=tokens["test"],
        data_collator=DataCollatorForMultipleChoice(tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()

    print(f"\n{'':22}accuracy")
    print(f"{'guessing':22}{1 / CHOICES:8.3f}")
    print(f"{'most words in common':22}{most_words_in_common(questions['test']):8.3f}")
    print(f"{'this model':22}{metrics['eval_accuracy']:8.3f}")

    example, chosen = questions["test"][0], trainer.predict(tokens["test"].select([0])).predictions[0].argmax()
    print(f"\n{example['question']}")
    for number, choice in enumerate(example["choices"]):
        print(f"  {'->' if number == chosen else '  '} {choice}{' (right)' if number == example['label'] else ''}")
    print(f"\nmodel:  {args.output_dir} (load it with AutoModelForMultipleChoice.from_pretrained)")
    print(f"charts: littrainer report {args.output_dir}")


if __name__ == "__main__":
    main()
