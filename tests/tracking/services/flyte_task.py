"""A Flyte task that trains; it runs without a cluster too, and saves its checkpoints in a folder then."""

from __future__ import annotations

import json
from pathlib import Path

from flytekit import current_context, task

from tests.tracking.both_sides import trainer_of


@task(enable_deck=True)
def train(side: str, folder: str) -> str:
    trainer = trainer_of(side, Path(folder), report_to=["flyte"], save_strategy="steps", save_steps=3)
    trainer.train()
    context = current_context()
    saved = {path.name for path in Path(context.checkpoint._checkpoint_dest).rglob("*") if path.is_file()}
    tables = {deck.name: deck.html for deck in context.decks}
    values = {"loss": "eval_accuracy" in tables["Log History"]}
    files = sorted(saved & {"model.safetensors", "trainer_state.json"}) + sorted(tables)
    return json.dumps({"values": values, "parameters": {"learning_rate": 0.01}, "files": files})
