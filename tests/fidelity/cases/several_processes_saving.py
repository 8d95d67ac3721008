"""Checkpoints that several processes write together, and resuming from them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.fidelity.cases.callbacks import raising
from tests.fidelity.record import Record, plain
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import NoisyClassifier


def build(side: Side, *callbacks: Any, kind: Any = None, **changes: Any) -> Any:
    return (kind or side.Trainer)(
        model=NoisyClassifier(),
        args=side.arguments(**{"save_strategy": "steps", "save_steps": 3, **changes}),
        train_dataset=Rows(vector_rows(36)),
        eval_dataset=Rows(vector_rows(10, seed=1)),
        callbacks=[*callbacks, side.watcher],
    )


def run_interrupted(side: Side, **changes: Any) -> Any:
    """Run a training that stops at its third step, where it saves."""
    return build(side, raising(side, "on_step_end", 3, "should_training_stop"), **changes).train()


def random_states_in(folder: str) -> dict[str, Any]:
    files = sorted(Path(folder).glob("rng_state*.pth"))
    return {file.name: plain(torch.load(file, weights_only=False)) for file in files}


@scenario(processes=2, saves=True, extra=True)
def random_states_of_each_process(side: Side) -> Record:
    trainer = build(side)
    result = trainer.train()
    dist.barrier()
    return side.record(trainer, result, extra=random_states_in("out/checkpoint-3"))


@scenario(processes=2, saves=True)
def each_process_draws_on_after_a_resume(side: Side) -> Record:
    first = run_interrupted(side, gradient_accumulation_steps=2)
    second = build(side, gradient_accumulation_steps=2)
    return side.record(second, first, second.train(resume_from_checkpoint=True))


def write_and_list(processes: int) -> None:
    """Let the checkpoint look as if transformers had written it in another number of processes."""
    dist.barrier()
    if dist.get_rank() == 0:
        folder = Path("out/checkpoint-3")
        for file in folder.glob("littrainer_*"):
            file.unlink()
        if processes == 1:
            (folder / "rng_state_0.pth").rename(folder / "rng_state.pth")
            (folder / "rng_state_1.pth").unlink()
        for rank in range(2, processes):
            shutil.copy(folder / "rng_state_1.pth", folder / f"rng_state_{rank}.pth")
    dist.barrier()


@scenario(processes=2, saves=True)
def checkpoint_from_a_single_process_resumed_in_two(side: Side) -> Record:
    first = run_interrupted(side)
    write_and_list(1)
    second = build(side)
    return side.record(second, first, second.train(resume_from_checkpoint=True))


@scenario(processes=2, saves=True)
def checkpoint_of_three_processes_resumed_in_two(side: Side) -> Record:
    first = run_interrupted(side, num_train_epochs=3)
    write_and_list(3)
    second = build(side, num_train_epochs=3)
    return side.record(second, first, second.train(resume_from_checkpoint="out/checkpoint-3"))


@scenario(processes=2, saves=True)
def checkpoint_of_transformers_in_as_many_processes(side: Side) -> Record:
    first = run_interrupted(side)
    write_and_list(2)
    second = build(side)
    return side.record(second, first, second.train(resume_from_checkpoint=True))


@scenario(processes=2, saves=True, extra=True)
def saving_methods_of_a_subclass_in_each_process(side: Side) -> Record:
    rank, calls = dist.get_rank(), []

    class Noting(side.Trainer):  # type: ignore[misc,name-defined]
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            calls.append(["save_model", _internal_call, self.args.should_save])
            super().save_model(output_dir, _internal_call)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            calls.append(["_save_checkpoint", self.state.global_step])
            super()._save_checkpoint(model, trial)

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            calls.append(["_save_optimizer_and_scheduler"])
            super()._save_optimizer_and_scheduler(output_dir)

        def _save_rng_state(self, output_dir: str) -> None:
            calls.append(["_save_rng_state"])
            super()._save_rng_state(output_dir)
            (Path(output_dir) / f"own_part_{rank}.txt").write_text(f"of process {rank}")

    trainer = build(side, kind=Noting, save_total_limit=1)
    result = trainer.train()
    dist.barrier()
    parts = {path.name: path.read_text() for path in sorted(Path("out").rglob("own_part_*"))}
    return side.record(trainer, result, extra={"calls": calls, "parts": parts})


@scenario(processes=2, saves=True, extra=True)
def each_node_saves_on_its_disk(side: Side) -> Record:
    rank, local_rank = dist.get_rank(), os.environ["LOCAL_RANK"]
    # Each process is the first of a node, and a relative folder differs between nodes.
    os.environ["LOCAL_RANK"] = "0"
    folder = Path(f"node{rank}")
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    try:
        trainer = build(side, save_on_each_node=True, save_total_limit=1)
        result = trainer.train()
        names = sorted(path.name for path in Path("out").glob("checkpoint-*/*"))
        results = {"names": [name for name in names if not name.startswith("littrainer")]}
        results["random states"] = random_states_in("out/checkpoint-9")
    finally:
        os.environ["LOCAL_RANK"] = local_rank
        os.chdir(side.folder)
    dist.barrier()
    return side.record(trainer, result, extra=results)


@scenario(processes=2, saves=True)
def the_best_model_is_loaded_in_each_process(side: Side) -> Record:
    trainer = build(
        side,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        learning_rate=0.5,
    )
    result = trainer.train()
    dist.barrier()
    return side.record(trainer, result)


@scenario(processes=2, saves=True)
def a_model_saved_after_training_in_each_process(side: Side) -> Record:
    trainer = side.vector_trainer()
    result = trainer.train()
    trainer.save_model("final")
    trainer.save_state()
    dist.barrier()
    return side.record(trainer, result)
