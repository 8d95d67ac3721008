"""How many input tokens the model has been fed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from littrainer.distributed.collectives import sum_over_processes

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)


class InputTokenCounter:
    """Counts input tokens as `include_num_input_tokens_seen` asks; warns once where it cannot."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def count(self, trainer: Trainer, inputs: Any) -> int:
        """Tokens in a micro-batch of all processes; 0 where they are not counted."""
        wanted = trainer.args.include_num_input_tokens_seen
        if wanted == "no":
            return 0
        main_input = getattr(trainer.model, "main_input_name", "input_ids")
        if main_input not in inputs:
            self._warn_once(f"Input tokens are not counted: the batch has no {main_input!r} (model.main_input_name).")
            return 0
        number = self._tokens_of_this_process(trainer, inputs, inputs[main_input])
        return int(sum_over_processes(number, trainer.args.device, trainer.get_tp_size()))

    def _tokens_of_this_process(self, trainer: Trainer, inputs: Any, token_ids: Any) -> int:
        if trainer.args.include_num_input_tokens_seen == "non_padding":
            if "attention_mask" in inputs:
                return int(inputs["attention_mask"].sum())
            padding = getattr(trainer.processing_class, "pad_token_id", None)
            if padding is not None:
                return int((token_ids != padding).sum())
            self._warn_once("Padding tokens are counted too: there is neither an attention mask nor a pad_token_id.")
        return int(token_ids.numel())

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)
