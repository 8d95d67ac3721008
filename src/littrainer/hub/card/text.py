"""The text of a model card, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from littrainer.hub.card.block import SEAL_PLACE
from littrainer.hub.card.elsewhere import LEFT_TO_THE_USER
from littrainer.hub.card.results import Results, label, rounded
from littrainer.hub.card.subject import Subject

HUB = "https://huggingface.co"
NOTE = "<!-- The Trainer wrote this card from what it knows. Once you have edited it, it is left as it is. -->"
LEFT_SECTIONS = ("Model description", "Intended uses & limitations", "Training and evaluation data")


def card_text(
    subject: Subject,
    results: Results,
    hyperparameters: Mapping[str, str],
    versions: Mapping[str, str],
    strategy: str,
    badges: Iterable[str] = (),
) -> str:
    """The text that follows the metadata; it has the place for the seal."""
    sections = [
        f"# {_text(subject.name)}",
        f"{NOTE}\n{SEAL_PLACE}",
        *badges,
        _beginning(subject),
        *_metrics(results),
        *(f"## {title}\n\n{LEFT_TO_THE_USER}" for title in LEFT_SECTIONS),
        "## Training procedure",
        "### Training hyperparameters",
        _items(hyperparameters),
        "### How it was trained",
        f"{_text(strategy)}.",
        *_table_of_results(results),
        "### Framework versions",
        "\n".join(f"- {name} {version}" for name, version in versions.items()),
    ]
    return "\n" + "\n\n".join(sections) + "\n"


def _beginning(subject: Subject) -> str:
    data = _listed([f"the {_text(data.name)} dataset" for data in subject.data]) or "data without a known name"
    if subject.started_from is None:
        return f"This model was trained from scratch on {data}."
    name = _text(subject.started_from)
    shown = f"[{name}]({HUB}/{subject.base_model})" if subject.base_model else f"`{name}`"
    return f"This model is a fine-tuned version of {shown}, trained on {data}."


def _metrics(results: Results) -> list[str]:
    if not results.metrics:
        return []
    lines = {label(*key): rounded(value) for key, value in results.metrics.items()}
    return [f"On the evaluation set it achieves:\n\n{_items(lines)}"]


def _table_of_results(results: Results) -> list[str]:
    if not results.rows:
        return []
    note = f"\n\n{results.left_out} further evaluations are left out." if results.left_out else ""
    return ["### Training results", f"{table(results.columns, results.rows)}{note}"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, its columns as wide as what they hold."""
    lines = [[_text(cell).replace("|", "\\|") for cell in line] for line in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    rule = "|" + "|".join(f":{'-' * width}:" for width in widths) + "|"
    return "\n".join([shown[0], rule, *shown[1:]])


def _items(lines: Mapping[str, str]) -> str:
    return "\n".join(f"- {_text(name)}: {_text(value)}" for name, value in lines.items())


def _listed(texts: list[str]) -> str:
    return " and ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)


def _text(text: str) -> str:
    """Text from outside as one line without tags of HTML and links."""
    return " ".join(str(text).split()).replace("<", "&lt;").replace(">", "&gt;").replace("](", "]\\(")
