"""A Flyte task that trains; without a cluster, it saves checkpoints in a folder."""

from __future__ import annotations

import json
from pathlib import Path

from flytekit import current_context, task

from tests.tracking.both_sides import make_trainer


@task(enable_deck=True)
def train(side: str, folder: str) -> str:
    trainer = make_trainer(side, Path(folder), report_to=["flyte"], save_strategy="steps", save_steps=3)
    trainer.train()
    context = current_context()
    saved = {path.name for path in Path(context.checkpoint._checkpoint_dest).rglob("*") if path.is_file()}
    tables = {deck.name: deck.html for deck in context.decks}
    values = {"loss": "eval_accuracy" in tables["Log History"]}
    files = sorted(saved & {"model.safetensors", "trainer_state.json"}) + sorted(tables)
    return json.dumps({"values": values, "parameters": {"learning_rate": 0.01}, "files": files})
