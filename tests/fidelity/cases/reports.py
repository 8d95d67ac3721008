"""Output and files of scripts about their runs: metrics tables, results files, the state, tokens and operations."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Iterator
from typing import Any

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import ORACLE, Side
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, Stream, language_rows, tiny_tokenizer, token_rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_gpt2

REPORTS = ("train_results.json", "eval_results.json", "test_results.json", "all_results.json", "trainer_state.json")
MEASURED = re.compile(r"_(runtime|per_second|model_preparation_time)$|_mem_cpu(_|$)")
TIMES_IN_TEXT = re.compile(r'(_(?:runtime|per_second|model_preparation_time)": )[\d.e-]+')


def report(trainer: Any, split: str, metrics: dict[str, Any]) -> str:
    """Write and print metrics, as the example scripts do, and return what was printed."""
    # Wall times are as wide as they are long, which would shift the table.
    same_times = {name: 3.25 if MEASURED.search(name) else value for name, value in metrics.items()}
    trainer.save_metrics(split, same_times)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.log_metrics(split, same_times)
    return printed.getvalue()


def write_reports(side: Side) -> dict[str, str]:
    """The text of each file of reports, without wall times."""
    paths = [side.folder / "out" / name for name in REPORTS]
    return {path.name: TIMES_IN_TEXT.sub(r"\1...", path.read_text()) for path in paths if path.exists()}


# Both sides log these at level info, files that transformers' models and tokenizers write included.
LOGGED = re.compile(r"\n?\*{5} Running |  |(Saving|Loading) model |.* saved in ")


@contextlib.contextmanager
def messages() -> Iterator[list[str]]:
    """Collects those lines; what handlers of transformers do to a record is done by then."""
    lines: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.INFO and LOGGED.match(record.getMessage()):
                lines.append(record.getMessage())

    collecting = Collecting()
    loggers = [logging.getLogger(name) for name in ("transformers", "littrainer")]
    for logger in loggers:
        logger.addHandler(collecting)
    try:
        yield lines
    finally:
        for logger in loggers:
            logger.removeHandler(collecting)


def bert_trainer(side: Side, **changes: Any) -> Any:
    return side.token_trainer(
        tiny_bert_classifier(),
        token_rows,
        compute_metrics=accuracy,
        include_num_input_tokens_seen="all",
        gradient_accumulation_steps=2,
        **changes,
    )


@scenario(saves=True, predicts=True, extra=True)
def reports_of_a_training_that_is_resumed(side: Side) -> Record:
    trainer = bert_trainer(side, num_train_epochs=1, save_strategy="epoch")
    printed = [report(trainer, "train", trainer.train().metrics)]
    trainer.save_state()
    texts = [write_reports(side)]
    resumed = bert_trainer(side, num_train_epochs=3, save_strategy="epoch")
    output = resumed.train(resume_from_checkpoint=True)
    printed.append(report(resumed, "train", output.metrics))
    printed.append(report(resumed, "eval", {**resumed.evaluate(), "eval_samples": 5}))
    predictions = resumed.predict(Rows(token_rows(4, seed=2)))
    printed.append(report(resumed, "test", predictions.metrics))
    resumed.save_state()
    texts.append(write_reports(side))
    return side.record(resumed, output, predictions=predictions, extra={"printed": printed, "texts": texts})


@scenario(extra=True)
def reports_of_an_evaluation_without_training(side: Side) -> Record:
    trainer = bert_trainer(side)
    metrics = trainer.evaluate()
    printed = [report(trainer, "eval", metrics)]
    trainer.save_metrics("eval", {"eval_loss": 1.5, "eval_note": "later"}, combined=False)
    trainer.save_state()
    extra = {"printed": printed, "texts": write_reports(side), "tokens": trainer.state.num_input_tokens_seen}
    return side.record(trainer, metrics, extra=extra)


@scenario(extra=True)
def operations_of_a_module_that_counts_its_parameters(side: Side) -> Record:
    class Counted(VectorClassifier):
        main_input_name = "x"
        number = 1000

        def num_parameters(self, exclude_embeddings: bool = False) -> int:
            return self.number + exclude_embeddings

    trainer = side.vector_trainer(Counted(), rows=10, num_train_epochs=1, include_num_input_tokens_seen="all")
    trainer.train()
    counted = [trainer.state.total_flos]
    trainer.model = trainer.model_wrapped = Counted()
    trainer.model.number = 2000
    trainer.optimizer = trainer.lr_scheduler = None
    output = trainer.train()
    counted += [trainer.state.total_flos, trainer.floating_point_ops({"x": vector_rows(1)[0]["x"]})]
    return side.record(trainer, output, extra={"operations": counted})


@scenario(extra=True)
def input_tokens_without_padding_by_the_tokenizer(side: Side) -> Record:
    def drop_mask(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in pad_tokens(rows).items() if name != "attention_mask"}

    trainer = side.Trainer(
        model=tiny_gpt2(),
        args=side.arguments(include_num_input_tokens_seen="non_padding", num_train_epochs=1),
        data_collator=drop_mask,
        train_dataset=Rows(language_rows(10)),
        processing_class=tiny_tokenizer(),
        callbacks=[side.watcher],
    )
    output = trainer.train()
    return side.record(trainer, output, extra={"tokens": trainer.state.num_input_tokens_seen})


@scenario(extra=True)
def input_tokens_without_a_padding_token(side: Side) -> Record:
    trainer = side.vector_trainer(rows=10, include_num_input_tokens_seen="non_padding", num_train_epochs=1)
    output = trainer.train()
    return side.record(trainer, output, extra={"tokens": trainer.state.num_input_tokens_seen})


@scenario(predicts=True)
def memory_metrics_of_evaluations_alone(side: Side) -> Record:
    trainer = side.Trainer(
        model=VectorClassifier(),
        args=side.arguments(skip_memory_metrics=False),
        eval_dataset=Rows(vector_rows(5, seed=1)),
        compute_metrics=accuracy,
        callbacks=[side.watcher],
    )
    outputs = [trainer.evaluate(), trainer.evaluate()]
    return side.record(trainer, *outputs, predictions=trainer.predict(Rows(vector_rows(4, seed=2))))


@scenario(saves=True, predicts=True, extra=True)
def messages_at_level_info(side: Side) -> Record:
    changes: dict[str, Any] = {"log_level": "info", "save_strategy": "steps", "eval_strategy": "epoch"}
    with messages() as lines:
        bert_trainer(side, num_train_epochs=2, save_steps=3, **changes).train()
        bert_trainer(side, num_train_epochs=3, save_steps=3, ignore_data_skip=True, **changes).train("out/checkpoint-3")
        trainer = bert_trainer(side, num_train_epochs=4, save_steps=3, **changes)
        output = trainer.train("out/checkpoint-3")
        trainer.evaluate(Stream(token_rows(5)))
        predictions = trainer.predict(Rows(token_rows(4, seed=2)))
        trainer.save_model("out/model")
        stream = side.Trainer(
            model=VectorClassifier(),
            args=side.arguments(max_steps=1, log_level="info", output_dir="stream"),
            train_dataset=Stream(vector_rows(12)),
        )
        stream.train()
    return side.record(trainer, output, predictions=predictions, extra={"told": lines})


@scenario(saves=True)
def what_watches_a_healthy_run_changes_nothing(side: Side) -> Record:
    """Ways of the health guard, tracked values and the clock, none of which transformers has."""
    is_oracle = side.name == ORACLE

    class Tracking(side.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            if not is_oracle:
                self.track("part", 1.0)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        def log(self, logs: dict[str, float], *args: Any) -> None:
            super().log({name: value for name, value in logs.items() if name != "part"}, *args)

    clock = {"save_minutes": 100.0, "eval_minutes": 100.0, "max_minutes": 100.0}
    outputs = []
    for way in ("warn", "skip", "stop"):
        watching = {} if is_oracle else {"on_nonfinite": way, "spike_factor": 1e6, **clock}
        trainer = side.vector_trainer(
            eval_rows=5, kind=Tracking, save_strategy="steps", save_steps=2, gradient_accumulation_steps=2, **watching
        )
        outputs.append(trainer.train())
    return side.record(trainer, *outputs)
