"""Lightning's internals are unchanged in the installed release."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from littrainer.lightning_adapter.fast_training_loop import SUPPORTED_RELEASES

ADVICE = (
    f"Lightning {pl.__version__} is not a release that the fast loop supports: trainings use Lightning's slower "
    "loop. Compare the differences, update lightning_adapter/fast_training_loop.py, then add the release to "
    "SUPPORTED_RELEASES and its digests here."
)

# Other digests in releases of 2.5, with a module hook that ends an epoch by returning -1, which TrainerModule does not
# have, without a flag for resuming, and with DDP's static graph around a module.
REPLACED_IN_2_5: dict[str, tuple[str, ...]] = {
    "pytorch.loops.loop:_Loop.on_iteration_done": ("8e07374134ed",),
    "pytorch.loops.training_epoch_loop:_TrainingEpochLoop.advance": ("58c791f79d73", "e37ae86450b0"),
    "pytorch.loops.training_epoch_loop:_TrainingEpochLoop.on_run_start": ("c4508f1462ad",),
    "pytorch.strategies.ddp:DDPStrategy.post_backward": ("e3c4a9644590",),
}
# Functions that the fast loop omits or replaces, below their class or module, each with the digest of its source.
REPLACED = """
fabric.plugins.precision.precision:Precision
    convert_input c323ad3616fd
pytorch.core.module:LightningModule
    _apply_batch_transfer_handler 168f5bf65759, backward 5eaa40852c22, optimizer_step 05c6dd5adce7
pytorch.core.optimizer:LightningOptimizer
    step d9ce660f8e79
pytorch.loops.fetchers:_DataFetcher
    __next__ e40395a802bc
pytorch.loops.fetchers:_PrefetchDataFetcher
    __next__ b197e030618b
pytorch.loops.loop:_Loop
    on_iteration_done 14e250439c8b
pytorch.loops.optimization.automatic:Closure
    closure b0f3e4cf86a9
pytorch.loops.optimization.automatic:ClosureResult
    from_training_step_output 22d1f086aee9
pytorch.loops.optimization.automatic:_AutomaticOptimization
    _make_zero_grad_fn 029892007548, _on_before_zero_grad 5ed55974a617, _optimizer_step 88db4ea67cd2,
    _optimizer_zero_grad e735b375562c, _training_step 9e2d61d136ca, run 35716a14943f
pytorch.loops.training_epoch_loop:_TrainingEpochLoop
    _num_ready_batches_reached e7071a6ce7f5, _should_accumulate 1eb44692b8d6, _update_learning_rates 22126bb89bbf,
    advance c211a8bb84d5, done ef34c49371b8, on_advance_end 8edd3ae96599, on_run_start 768d85147568,
    run 9ff091c84cd7
pytorch.plugins.precision.amp:MixedPrecision
    optimizer_step 66fbaea7a0d3, pre_backward 5e33ffea4117
pytorch.plugins.precision.precision:Precision
    _after_closure 45c5ac93ea82, _clip_gradients 6cc3d4a24f22, _wrap_closure a0f9d6630ac9, backward 68200e19e697,
    optimizer_step 491c0da876cd, post_backward e005f6ed0645, pre_backward 9ca3ca94bbf9,
    train_step_context 811619a68a7f
pytorch.strategies.ddp:DDPStrategy
    optimizer_step 5cf5b760be11, post_backward a43189cd4035, pre_backward 340346c738cb
pytorch.strategies.strategy:Strategy
    backward d7527ce3472c, batch_to_device 630d8415a6e1, on_train_batch_start d3c00e966af8,
    optimizer_step 9e519dae2a7a, post_training_step 487a228b4c37, training_step b585ea076110
pytorch.trainer.call:
    _call_and_handle_interrupt b6558833d611, _call_callback_hooks db53c7410f78,
    _call_lightning_module_hook 160281faa0f9, _call_strategy_hook ecbeca072455
pytorch.trainer.connectors.logger_connector.logger_connector:_LoggerConnector
    on_batch_end 910e37278afb, on_batch_start b86eeef7d7e3, on_epoch_end 2f8de9aa3568,
    update_train_step_metrics 60aefb4bedf9
pytorch.trainer.trainer:Trainer
    _run 1ab5dab106fc, _run_stage ebb8de8f577c
pytorch.utilities.combined_loader:CombinedLoader
    __next__ f3da7576dafb
pytorch.utilities.combined_loader:_MaxSizeCycle
    __next__ b8bfd20ef75f
"""


def digest(function: Any) -> str:
    """Return the digest of a function's code without comments and docstring."""
    lines, _ = inspect.getsourcelines(function)
    tree: Any = ast.parse(textwrap.dedent("".join(lines)))
    first = tree.body[0].body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        del lines[first.lineno - 1 : first.end_lineno]
    code = [line.split("  #")[0].strip() for line in lines]
    return hashlib.sha256("\n".join(line for line in code if line and line[0] != "#").encode()).hexdigest()[:12]


def find_function(name: str) -> Any:
    module_name, _, path = name.partition(":")
    target: Any = __import__(f"lightning.{module_name}", fromlist=["_"])
    for part in path.split("."):
        target = getattr(target, part)
    return inspect.unwrap(target.fget if isinstance(target, property) else target)


def test_the_fast_loop_supports_the_installed_release() -> None:
    assert pl.__version__ in SUPPORTED_RELEASES, ADVICE


def test_functions_that_the_fast_loop_replaces_are_unchanged() -> None:
    owner, changed = "", []
    for line in REPLACED.strip().splitlines():
        if not line.startswith(" "):
            owner = line if line.endswith(":") else f"{line}."
            continue
        for function, expected in (pair.split() for pair in line.strip(" ,").split(", ")):
            name = f"{owner}{function}"
            earlier = REPLACED_IN_2_5.get(name, ()) if pl.__version__.startswith("2.5.") else ()
            if digest(find_function(name)) not in {expected, *earlier}:
                changed.append(name)
    assert not changed, ADVICE


# Class of Lightning -> its members that a subclass of ours overrides or calls.
USED: dict[Any, str] = {
    DDPStrategy: "_setup_model configure_ddp block_backward_sync setup teardown _configure_launcher",
    DeepSpeedStrategy: "_get_process_group_backend set_world_ranks setup_distributed setup_optimizers",
    FSDPStrategy: "_reset_optimizers_and_schedulers _setup_model setup_optimizers training_step",
    ModelParallelStrategy: "_setup_distributed post_backward setup_environment",
    Precision: "_after_closure forward_context convert_module convert_input convert_output",
    WeightAveraging: "_swap_models on_validation_epoch_start on_validation_epoch_end",
}


@pytest.mark.parametrize("kind", USED, ids=lambda kind: kind.__name__)
def test_lightnings_classes_have_the_members_that_ours_use(kind: Any) -> None:
    missing = [name for name in USED[kind].split() if not hasattr(kind, name)]
    assert not missing, f"update the subclass of {kind.__name__} in lightning_adapter/ or strategies/: {missing}"


def test_a_ddp_strategy_stores_its_arguments() -> None:
    strategy: Any = DDPStrategy(ddp_comm_state="state", ddp_comm_hook=print, ddp_comm_wrapper=abs)
    assert (strategy._ddp_comm_state, strategy._ddp_comm_hook, strategy._ddp_comm_wrapper) == ("state", print, abs)
    assert strategy._layer_sync is None and strategy._start_method == "popen"
