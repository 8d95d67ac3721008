from __future__ import annotations

from huggingface_hub import ModelCardData

from littrainer.callbacks.log_history import EVALUATION
from littrainer.hub.card.metadata import joined, metadata_of
from littrainer.hub.card.results import Results
from littrainer.hub.card.subject import Data, Given, Subject

SUBJECT = Subject(
    name="name",
    started_from="org/base",
    base_model="org/base",
    library="transformers",
    tasks=("text-classification",),
    data=(Data("GLUE MRPC", "glue", "mrpc", "validation", "mrpc"),),
    languages=("en",),
    license="mit",
    tags=("generated_from_trainer",),
)
RESULTS = Results({("accuracy", EVALUATION): 0.75, ("loss", EVALUATION): 0.5})


def test_the_hubs_own_class_reads_the_results() -> None:
    data = ModelCardData(**metadata_of(SUBJECT, RESULTS))
    assert (data.license, data.base_model, data.datasets, data.metrics) == ("mit", "org/base", ["glue"], ["accuracy"])
    (result,) = data.eval_results or []
    assert (result.task_type, result.task_name) == ("text-classification", "Text Classification")
    assert (result.dataset_type, result.dataset_name) == ("glue", "GLUE MRPC")
    assert (result.dataset_config, result.dataset_split, result.dataset_args) == ("mrpc", "validation", "mrpc")
    assert (result.metric_type, result.metric_name, result.metric_value) == ("accuracy", "Accuracy", 0.75)


def test_results_without_a_task_a_dataset_or_a_metric_are_left_out() -> None:
    for subject, results in (
        (Subject(**{**vars(SUBJECT), "tasks": ()}), RESULTS),
        (Subject(**{**vars(SUBJECT), "data": ()}), RESULTS),
        (SUBJECT, Results({("loss", EVALUATION): 0.5})),
    ):
        metadata = metadata_of(subject, results)
        assert metadata["model-index"] == [{"name": "name", "results": []}]
        ModelCardData(**metadata)


def test_a_persons_entries_win_over_found_ones_and_lose_against_given_ones() -> None:
    new = metadata_of(SUBJECT, RESULTS)
    theirs = {"license": "apache-2.0", "language": "de", "tags": ["mine"], "widget": [{"text": "x"}], "metrics": ["f1"]}
    entries = joined(new, theirs, Given(language="en"))
    assert entries["license"] == "apache-2.0" and entries["language"] == ["en"]
    assert entries["widget"] == [{"text": "x"}]
    assert entries["tags"] == ["generated_from_trainer", "mine"]
    assert entries["metrics"] == ["accuracy"]


def test_an_entry_that_a_person_took_out_comes_back_where_the_script_names_it() -> None:
    new = metadata_of(SUBJECT, RESULTS)
    assert "license" not in joined(new, {}, Given(), ["license"])
    assert joined(new, {}, Given(license="mit"), ["license"])["license"] == "mit"
    assert "model-index" in joined(new, {}, Given(), ["model-index"])
