"""Script for transformers 4, run unchanged with the redirection."""

import json
from pathlib import Path

from tests.compat.processes import run_python

SCRIPT = """
import json
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer_utils import EvaluationStrategy


@dataclass
class DataArguments:
    rows: int = field(default=8, metadata={"help": "How many rows."})


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x, labels=None):
        predicted = self.linear(x).squeeze(-1)
        return {"loss": ((predicted - labels) ** 2).mean(), "logits": predicted}


class OldTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class Tokenizer:
    def save_pretrained(self, folder):
        pass


data_args, args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
assert args.evaluation_strategy == EvaluationStrategy.EPOCH and args.overwrite_output_dir and args.no_cuda
rows = [{"x": torch.tensor([float(i), 1.0]), "labels": torch.tensor(float(i))} for i in range(data_args.rows)]
tokenizer = Tokenizer()
trainer = OldTrainer(model=Regression(), args=args, train_dataset=rows, eval_dataset=rows, tokenizer=tokenizer,
                     data_collator=torch.utils.data.default_collate)
assert trainer.tokenizer is tokenizer
trainer.train(model_path=None)
history = trainer.state.log_history
print(json.dumps({"home": Trainer.__module__, "steps": trainer.state.global_step,
                  "evaluations": sum("eval_loss" in entry for entry in history)}))
"""


def test_a_script_for_transformers_4_trains_with_warnings(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    options = (
        "--output_dir out --overwrite_output_dir --evaluation_strategy epoch --per_gpu_train_batch_size 4 --no_cuda"
    )
    done = run_python("-m", "littrainer", "run", "train.py", *options.split(), "--num_train_epochs", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"home": "littrainer.trainer", "steps": 4, "evaluations": 2}
    for name in ("evaluation_strategy", "overwrite_output_dir", "per_gpu_train_batch_size", "no_cuda"):
        assert done.stderr.count(f"FutureWarning: {name}=") == 1, name
    for phrase in ("processing_class", "resume_from_checkpoint", "OldTrainer.compute_loss without num_items_in_batch"):
        assert phrase in done.stderr
