"""Questions about a Python function, answered with a piece of its source code.

The functions are those of the standard library on this machine, and the answers are found by parsing them: what a
function returns, which exception it raises, what its last parameter is called and what its default is. A small BERT,
trained from scratch, has to point at the answer in the text. Sources that are longer than the model reads at once are
cut into windows that overlap, and the best span of all windows counts. Exact match and F1 are compared with answering
each question with the answer that is most frequent in training.

    python examples/extractive_question_answering.py
    littrainer run examples/extractive_question_answering.py

Both lines print the same numbers; the second one trains on Lightning. Every training argument is an option, as in
`--max_steps 20 --learning_rate 1e-3`.
"""

import ast
import re
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import datasets
import numpy as np
from datasets import Dataset
from local_texts import read_sources
from small_tokenizers import train_wordpiece
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

RETURNS = "What does the function return?"
RAISES = "Which exception does the function raise?"
LAST_PARAMETER = "What is the name of the last parameter?"
LAST_DEFAULT = "What is the default of the last parameter?"

# Tokens of a question and a window together, and how many of them two neighbouring windows of a source share.
WINDOW_TOKENS = 128
SHARED_TOKENS = 32
MOST_ANSWER_TOKENS = 24
SPANS_PER_WINDOW = 8


DEFAULTS = {
    "output_dir": "runs/extractive_question_answering",
    "num_train_epochs": 3,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 64,
    "learning_rate": 2e-3,
    "warmup_steps": 50,
    "weight_decay": 0.01,
    "logging_steps": 20,
    "eval_strategy": "no",
    "save_strategy": "no",
    "dataloader_pin_memory": False,
    "seed": 0,
    "report_to": "none",
}


@dataclass
class Options:
    questions: int = field(default=1600, metadata={"help": "to train on at most; a quarter as many to test on"})
    vocabulary: int = field(default=2000, metadata={"help": "tokens at most"})


# ---------------------------------------------------------------- questions and answers


def functions_in(source):
    """The source code of each function of a file that is neither trivial nor long, without its indentation."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            text = textwrap.dedent("\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]))
            # Positions in a syntax tree count bytes; in ASCII these are characters.
            if 150 <= len(text) <= 450 and text.isascii():
                yield text


def answers_in(function):
    """(question, node of the syntax tree that answers it) for one function."""
    parameters = function.args.posonlyargs + function.args.args
    if len(parameters) > 1:
        yield LAST_PARAMETER, parameters[-1]
    if function.args.defaults:
        yield LAST_DEFAULT, function.args.defaults[-1]
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            yield RETURNS, node.value
        if isinstance(node, ast.Raise) and isinstance(node.exc, (ast.Call, ast.Name)):
            yield RAISES, node.exc.func if isinstance(node.exc, ast.Call) else node.exc


def questions_about(text):
    """Rows in the shape of SQuAD for one function: context, question, and answer with the character it starts at.

    A function that returns or raises in several places is asked about neither.
    """
    try:
        function = ast.parse(text).body[0]
    except SyntaxError:  # a string over several lines has lost its indentation
        return []
    found = list(answers_in(function))
    times_asked = Counter(question for question, _ in found)
    line_starts = np.cumsum([0, *(len(line) + 1 for line in text.split("\n"))])
    rows = []
    for question, node in found:
        start = int(line_starts[node.lineno - 1]) + node.col_offset
        end = int(line_starts[node.end_lineno - 1]) + node.end_col_offset
        if isinstance(node, ast.arg):  # without its annotation
            end = start + len(node.arg)
        if times_asked[question] == 1 and end - start <= 60:
            answer = {"text": text[start:end], "start": start}
            rows.append({"context": text, "question": question, "answer": answer})
    return rows


def load_questions(most_to_train_on, seed):
    """Training and test questions, four to one, about different functions."""
    functions = sorted({text for _, source in read_sources() for text in functions_in(source)})
    np.random.default_rng(seed).shuffle(functions)
    rows = {"test": [], "train": []}
    for number, text in enumerate(functions):
        rows["train" if number % 5 else "test"] += questions_about(text)
    return rows["train"][:most_to_train_on], rows["test"][: most_to_train_on // 4]


def prepare(rows, tokenizer, first_question=0):
    """Windows over the contexts of some questions, with the tokens that their answers begin and end at.

    A window that does not hold the whole answer points at its first token, [CLS].
    """
    windows = tokenizer(
        rows["question"],
        rows["context"],
        truncation="only_second",
        max_length=WINDOW_TOKENS,
        stride=SHARED_TOKENS,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    question_of = windows.pop("overflow_to_sample_mapping")
    offsets_of = windows.pop("offset_mapping")
    starts, ends, spans = [], [], []
    for window, (question, offsets) in enumerate(zip(question_of, offsets_of, strict=True)):
        # Tokens of the context by where they lie in it; those of the question have no place there.
        parts = windows.sequence_ids(window)
        places = [place if part == 1 else (-1, -1) for place, part in zip(offsets, parts, strict=True)]
        answer = rows["answer"][question]
        begin, end = answer["start"], answer["start"] + len(answer["text"])
        first = [token for token, place in enumerate(places) if place[0] <= begin < place[1]]
        last = [token for token, place in enumerate(places) if place[0] < end <= place[1]]
        starts.append(first[0] if first and last else 0)
        ends.append(last[0] if first and last else 0)
        spans.append(places)
    return {
        **windows,
        "start_positions": starts,
        "end_positions": ends,
        "places": spans,
        "question_number": [first_question + number for number in question_of],
    }


# ---------------------------------------------------------------- from logits to answers and scores


def best_answers(start_logits, end_logits, windows, questions):
    """The text of the best span for each question, over all its windows."""
    best = defaultdict(lambda: (-np.inf, ""))
    for starts, ends, places, question in zip(
        start_logits, end_logits, windows["places"], windows["question_number"], strict=True
    ):
        context = questions[question]["context"]
        for start in np.argsort(starts)[-SPANS_PER_WINDOW:]:
            for end in np.argsort(ends)[-SPANS_PER_WINDOW:]:
                # What is padding, beyond the window, has no place either.
                if not start <= end < min(start + MOST_ANSWER_TOKENS, len(places)) or places[start][0] < 0:
                    continue
                score = starts[start] + ends[end]
                if score > best[question][0]:
                    best[question] = (score, context[places[start][0] : places[end][1]])
    return [best[number][1] for number in range(len(questions))]


def f1_of_words(answer, expected):
    """How far two texts have their words and signs in common, between 0 and 1."""
    answered, wanted = Counter(split(answer)), Counter(split(expected))
    shared = (answered & wanted).total()
    return 2 * shared / max(answered.total() + wanted.total(), 1)


def split(text):
    """Names and numbers as they are, every other sign by itself."""
    return re.findall(r"\w+|[^\w\s]", text)


def scores(answers, questions):
    expected = [row["answer"]["text"] for row in questions]
    pairs = list(zip(answers, expected, strict=True))
    return {
        "exact_match": float(np.mean([answer == wanted for answer, wanted in pairs])),
        "f1": float(np.mean([f1_of_words(answer, wanted) for answer, wanted in pairs])),
    }


def most_frequent_answers(train, test):
    """For each question of the test the answer that was most frequent in training."""
    counts = defaultdict(Counter)
    for row in train:
        counts[row["question"]][row["answer"]["text"]] += 1
    return [counts[row["question"]].most_common(1)[0][0] for row in test]


# ---------------------------------------------------------------- the run


def main():
    parser = HfArgumentParser((Options, TrainingArguments), description=__doc__.splitlines()[0])
    parser.set_defaults(**DEFAULTS)
    options, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    datasets.disable_progress_bars()

    train, test = load_questions(options.questions, args.seed)
    print(f"{len(train)} questions to train on, {len(test)} to test on")

    tokenizer = train_wordpiece(
        [text for row in train for text in (row["context"], row["question"])], options.vocabulary
    )
    windows = {
        name: Dataset.from_list(rows).map(
            lambda batch, numbers: prepare(batch, tokenizer, numbers[0]),
            batched=True,
            with_indices=True,
            remove_columns=["context", "question", "answer"],
        )
        for name, rows in {"train": train, "test": test}.items()
    }
    print(f"{len(windows['train'])} windows of at most {WINDOW_TOKENS} tokens to train on")
    model = BertForQuestionAnswering(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=192,
            max_position_embeddings=WINDOW_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    test_windows = {name: windows["test"][name] for name in ("places", "question_number")}

    def compute_metrics(prediction):
        start_logits, end_logits = prediction.predictions
        return scores(best_answers(start_logits, end_logits, test_windows, test), test)

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=windows["train"],
        eval_dataset=windows["test"],
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()

    start_logits, end_logits = trainer.predict(windows["test"]).predictions
    answers = best_answers(start_logits, end_logits, test_windows, test)
    for row, answer in list(zip(test, answers, strict=True))[:5]:
        print(f"\n{row['context'].splitlines()[0]}")
        print(f"  {row['question']}  {answer}  (right: {row['answer']['text']})")

    ours, baseline = scores(answers, test), scores(most_frequent_answers(train, test), test)
    print(f"\n{'':24}exact match    F1")
    print(f"{'most frequent answer':24}{baseline['exact_match']:11.3f}{baseline['f1']:7.3f}")
    print(f"{'this model':24}{ours['exact_match']:11.3f}{ours['f1']:7.3f}")
    print(f"\nmodel:  {args.output_dir} (load it with AutoModelForQuestionAnswering.from_pretrained)")
    print(f"charts: littrainer report {args.output_dir}")


if __name__ == "__main__":
    main()
