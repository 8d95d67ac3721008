"""Callbacks of transformers' own classes, made before the redirection, in a Trainer that comes after it."""

from __future__ import annotations

from pathlib import Path

from .processes import facts_of

COLLECT = """
import json, warnings
from transformers import EarlyStoppingCallback, TrainerCallback

class Counting(TrainerCallback):
    def __init__(self):
        self.events = []
    def on_init_end(self, args, state, control, **given):
        self.events.append("init_end")
    def on_step_end(self, args, state, control, model, optimizer, **given):
        control.should_log = state.global_step == 2
        self.events.append(["step_end", state.global_step])
        return control
    def on_log(self, args, state, control, logs, **given):
        self.events.append(["log", *sorted(name for name in logs if "_" not in name)])

early, counting = EarlyStoppingCallback(2), Counting()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import littrainer.auto
import torch, transformers
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Linear):
    steps = 0
    def forward(self, x, labels=None):
        logits = super().forward(x)
        # The loss gets worse with each step, so that patience ends.
        self.steps += 1
        return {"loss": torch.nn.functional.cross_entropy(logits, labels) * self.steps, "logits": logits}

rows = [{"x": torch.ones(2), "labels": 1} for _ in range(8)]
args = TrainingArguments(
    "out", per_device_train_batch_size=1, max_steps=8, logging_steps=50, eval_strategy="steps", eval_steps=1,
    save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss",
    report_to="none", disable_tqdm=True, use_cpu=True,
)
trainer = Trainer(Model(2, 2), args, train_dataset=rows, eval_dataset=rows[:1], callbacks=[early, counting])
trainer.train()
print(json.dumps({
    "kinds": [type(one).__module__ for one in (trainer, early, counting)],
    "steps": trainer.state.global_step,
    "patience": early.early_stopping_patience_counter,
    "saved": sorted(trainer.state.stateful_callbacks),
    "events": counting.events,
    "kept": [one in trainer.callback_handler.callbacks for one in (early, counting)],
}))
"""


def test_callbacks_of_transformers_own_classes_are_taken_as_they_are_and_get_every_event(tmp_path: Path) -> None:
    facts = facts_of(COLLECT, tmp_path)
    assert facts["kinds"] == ["littrainer.trainer", "transformers.trainer_callback", "__main__"]
    assert facts["kept"] == [True, True]
    # They steer the training and have their state saved.
    assert (facts["steps"], facts["patience"]) == (3, 2)
    assert "EarlyStoppingCallback" in facts["saved"]
    assert facts["events"][:2] == ["init_end", ["step_end", 1]]
    assert ["log", "epoch", "loss"] in facts["events"]
