"""What is each name in a Python function: a parameter, a local variable, an attribute, a builtin or something global?

An ordinary transformers script that needs no network. Its texts are functions of the standard library, word by word
without their layout, and its labels come from Python's own parser. Knowing a name is not enough, since `name` is a
parameter here and an attribute there; the model has to find out from what stands around it. A small BERT is trained
from scratch and compared with a table that gives each name its most frequent role.

    python examples/token_classification.py
    littrainer run examples/token_classification.py

Both lines print the same numbers; the second one trains on Lightning. Every training argument is an option, as in
`--max_steps 20 --learning_rate 1e-3`.
"""

import ast
import builtins
import io
import random
import tokenize
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import datasets
import numpy as np
import torch
from datasets import Dataset
from local_texts import read_sources
from small_tokenizers import train_wordpiece
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

ROLES = ["parameter", "local", "attribute", "builtin", "global", "other"]
OTHER = ROLES.index("other")
LINE = "def first(items, name): found = [item for item in items if item.name == name]; return found[0]"
IGNORED = -100  # the label that the loss leaves out
DEFAULTS = {
    "output_dir": "runs/token_classification",
    "num_train_epochs": 3,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 64,
    "learning_rate": 2e-3,
    "warmup_steps": 50,
    "logging_steps": 50,
    "eval_strategy": "epoch",
    "save_strategy": "no",
    "dataloader_pin_memory": False,
    "seed": 0,
    "report_to": "none",
}


@dataclass
class Options:
    functions: int = field(default=4000, metadata={"help": "to read, one in ten of them for evaluation"})
    max_words: int = field(default=64, metadata={"help": "of a function; longer ones are left out"})
    vocabulary: int = field(default=2000, metadata={"help": "tokens at most"})
    max_tokens: int = field(default=128, metadata={"help": "of a function; the rest of it is left out"})


# ---------------------------------------------------------------- functions and the roles of their names


def roles_in(function):
    """The role of each name in a function, by the line and column (in bytes) at which it begins."""
    arguments = [node for node in ast.walk(function) if isinstance(node, ast.arg)]
    parameters = {node.arg for node in arguments}
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    roles = {(node.lineno, node.col_offset): "parameter" for node in arguments}
    for node in names:
        known = (
            (node.id in parameters, "parameter"),
            (node.id in stored, "local"),
            (hasattr(builtins, node.id), "builtin"),
            (True, "global"),
        )
        roles[node.lineno, node.col_offset] = next(role for holds, role in known if holds)
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute):
            roles[node.end_lineno, node.end_col_offset - len(node.attr.encode())] = "attribute"
    return roles


def functions_in(source):
    """(words, roles) of each function that is not within another one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except SyntaxError:
        return
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    for node in (node for body in bodies for node in body if isinstance(node, ast.FunctionDef)):
        # By itself, from column 0 on and without comments, strings that are statements, and blank lines.
        node.body = [statement for statement in node.body if not is_string(statement)] or [ast.Pass()]
        text = ast.unparse(node)
        roles = roles_in(ast.parse(text).body[0])
        lines = text.splitlines()
        words, labels = [], []
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.string.strip():
                row, column = token.start
                words.append(token.string)
                place = (row, len(lines[row - 1][:column].encode()))
                labels.append(ROLES.index(roles.get(place, "other")) if token.type == tokenize.NAME else OTHER)
        yield words, labels


def is_string(statement):
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def load_functions(count, max_words, seed):
    """Functions of the standard library in two sets; none of a module that is in one set is in the other."""
    sources = [text for _, text in read_sources()]
    random.Random(seed).shuffle(sources)
    rows, held_out = {"words": [], "roles": []}, 0
    for source in sources:
        for words, roles in functions_in(source):
            if len(words) <= max_words:
                rows["words"].append(words)
                rows["roles"].append(roles)
        # The first modules are for evaluation, until they hold a tenth of all functions.
        held_out = held_out or (len(rows["words"]) if len(rows["words"]) >= count // 10 else 0)
        if len(rows["words"]) >= count:
            break
    every = Dataset.from_dict(rows)
    return datasets.DatasetDict(
        train=every.select(range(held_out, min(count, len(every)))), test=every.select(range(held_out))
    )


def align(rows, tokenizer):
    """Tokens of each row's words; a word's first token has its role, and all others have none."""
    tokens = tokenizer(rows["words"], is_split_into_words=True, truncation=True)
    tokens["labels"] = []
    for number, roles in enumerate(rows["roles"]):
        words = tokens.word_ids(number)
        before = [None, *words[:-1]]
        tokens["labels"].append(
            [IGNORED if word is None or word == last else roles[word] for word, last in zip(words, before, strict=True)]
        )
    return tokens


# ---------------------------------------------------------------- scores


def scores(predicted, expected):
    """Accuracy over names, and the F1 of the roles that a name can have, averaged."""
    f1 = []
    for role in range(OTHER):
        hits = np.sum((predicted == role) & (expected == role))
        f1.append(2 * hits / max(np.sum(predicted == role) + np.sum(expected == role), 1))
    is_name = expected != OTHER
    return {"accuracy": float((predicted == expected)[is_name].mean()), "macro_f1": float(np.mean(f1))}


def table_scores(train, evaluation):
    """What giving each name the role it has most often in training would score; an unknown name is taken as a local."""
    seen = defaultdict(Counter)
    for words, roles in zip(train["words"], train["roles"], strict=True):
        for word, role in zip(words, roles, strict=True):
            seen[word][role] += 1
    most_frequent = {word: counts.most_common(1)[0][0] for word, counts in seen.items()}
    pairs = [
        (most_frequent.get(word, ROLES.index("local") if word.isidentifier() else OTHER), role)
        for words, roles in zip(evaluation["words"], evaluation["roles"], strict=True)
        for word, role in zip(words, roles, strict=True)
    ]
    predicted, expected = np.array(pairs).T
    return scores(predicted, expected)


def show(model, tokenizer, source):
    """Print the names of one line of code with the roles that the model gives them."""
    words = [token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.string.strip()]
    tokens = tokenizer(words, is_split_into_words=True, return_tensors="pt")
    model.eval()
    with torch.no_grad():
        labels = model(**tokens.to(model.device)).logits[0].argmax(dim=-1).tolist()
    print(f"\n{source}")
    first = {word: place for place, word in reversed(list(enumerate(tokens.word_ids()))) if word is not None}
    for number, word in enumerate(words):
        if labels[first[number]] != OTHER:
            print(f"    {word:12}{ROLES[labels[first[number]]]}")


# ---------------------------------------------------------------- the run


def main():
    parser = HfArgumentParser((Options, TrainingArguments), description=__doc__.splitlines()[0])
    parser.set_defaults(**DEFAULTS)
    options, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    datasets.disable_progress_bars()

    functions = load_functions(options.functions, options.max_words, args.seed)
    print(f"{len(functions['train'])} functions to train on, {len(functions['test'])} to evaluate on")
    texts = [" ".join(words) for words in functions["train"]["words"]]
    tokenizer = train_wordpiece(texts, options.vocabulary, options.max_tokens)
    tokens = functions.map(align, batched=True, fn_kwargs={"tokenizer": tokenizer}, remove_columns=["words", "roles"])

    def compute_metrics(prediction):
        is_first = prediction.label_ids != IGNORED
        return scores(prediction.predictions.argmax(axis=-1)[is_first], prediction.label_ids[is_first])

    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=192,
        initializer_range=0.1,  # the usual 0.02 suits layers that are eight times as wide
        max_position_embeddings=options.max_tokens,
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(ROLES)),
        label2id={role: number for number, role in enumerate(ROLES)},
    )
    trainer = Trainer(
        model=BertForTokenClassification(config),
        args=args,
        train_dataset=tokens["train"],
        eval_dataset=tokens["test"],
        data_collator=DataCollatorForTokenClassification(tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()

    baseline = table_scores(functions["train"], functions["test"])
    print(f"\n{'':18}accuracy  macro-F1 over the roles of names")
    print(f"{'role by name':18}{baseline['accuracy']:8.3f}{baseline['macro_f1']:10.3f}")
    print(f"{'this model':18}{metrics['eval_accuracy']:8.3f}{metrics['eval_macro_f1']:10.3f}")
    show(
        trainer.model,
        tokenizer,
        LINE,
    )
    print(f"\nmodel:  {args.output_dir} (load it with AutoModelForTokenClassification.from_pretrained)")
    print(f"charts: littrainer report {args.output_dir}")


if __name__ == "__main__":
    main()
