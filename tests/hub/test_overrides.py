"""Overrides of pushing are called with the same parameters as by transformers."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from littrainer import Trainer, TrainerCallback
from tests.hub.runs import pushing_trainer
from tests.hub.server import GOOD_TOKEN, Hub
from tests.hub.test_pushing import SAVES


def test_each_method_is_called_where_transformers_calls_it(hub: Hub, tmp_path: Path) -> None:
    calls: list[Any] = []

    class Watching(Trainer):
        def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
            calls.append("init_hf_repo")
            super().init_hf_repo(token, private)

        def create_model_card(self, *args: Any, **kwargs: Any) -> None:
            calls.append(("create_model_card", args, kwargs))
            super().create_model_card(*args, **kwargs)

        def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(("push_to_hub", args, kwargs))
            return super().push_to_hub(*args, **kwargs)

        def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
            calls.append(("_push_from_checkpoint", Path(checkpoint_folder).name))
            super()._push_from_checkpoint(checkpoint_folder)

        def _finish_current_push(self) -> None:
            calls.append("_finish_current_push")
            super()._finish_current_push()

    class Listener(TrainerCallback):
        def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            calls.append("on_push_begin")

    callbacks = {"callbacks": [Listener()]}
    trainer: Any = pushing_trainer(tmp_path, kind=Watching, hub_revision="mine", trainer_kwargs=callbacks)
    assert calls == ["init_hf_repo"]
    trainer.train()
    trainer.save_model()
    assert calls[1:] == [
        *(call for step in (2, 4, 6) for call in (("_push_from_checkpoint", f"checkpoint-{step}"), "on_push_begin")),
        "_finish_current_push",
        ("push_to_hub", (), {"commit_message": "Model save", "revision": "mine"}),
        "on_push_begin",
        ("create_model_card", (), {"model_name": "run"}),
        "_finish_current_push",
    ]


def test_an_override_may_store_its_futures_in_an_object_like_that_of_transformers(hub: Hub, tmp_path: Path) -> None:
    from transformers.utils import PushInProgress

    with ThreadPoolExecutor(1) as pool:

        class PushesItself(Trainer):
            def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
                job: Future[int] = pool.submit(lambda: len(checkpoint_folder))
                self.push_in_progress = PushInProgress([job])  # type: ignore[arg-type]

        trainer = pushing_trainer(tmp_path, kind=PushesItself)
        trainer.train()
        assert trainer.push_in_progress.is_done()
    assert hub.repository().messages() == []


def test_an_argument_set_after_construction_creates_the_repository_with_the_first_push(
    hub: Hub, tmp_path: Path
) -> None:
    trainer = pushing_trainer(tmp_path, push_to_hub=False, hub_token=None)
    trainer.args.push_to_hub, trainer.args.hub_token = True, GOOD_TOKEN
    trainer.train()
    assert hub.repository().messages() == SAVES


def test_a_card_that_an_override_writes_at_each_save_is_pushed(hub: Hub, tmp_path: Path) -> None:
    class CardTrainer(Trainer):
        """A trainer like TRL's."""

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            self.create_model_card(model_name=f"step {self.state.global_step}")
            super()._save_checkpoint(model, trial)

        def create_model_card(  # type: ignore[override]
            self, model_name: str | None = None, dataset_name: str | None = None, tags: Any = None
        ) -> None:
            if self.is_world_process_zero():
                content = f"---\nlibrary_name: own\n---\n# {model_name} with {tags}\n"
                Path(self.args.output_dir, "README.md").write_text(content)

    trainer: Any = pushing_trainer(tmp_path, kind=CardTrainer, save_steps=6)
    trainer.train()
    assert hub.repository().files()["README.md"].endswith(b"# step 6 with None\n")
    trainer.model.model_tags = ["sft"]
    trainer.push_to_hub(dataset_name="data", tags="mine")
    assert hub.repository().files()["README.md"].endswith(b"# run with ['mine', 'sft']\n")
