from __future__ import annotations

import functools
import operator
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import SwinConfig, SwinForImageClassification

from littrainer import TransformersModule
from littrainer.optim.muon import BY_MUON, MuonWithAdamW
from littrainer.optim.optimizers import OptimizerNotInstalledError, get_optimizer_class_and_keywords
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_gpt2
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


def stepped_by_muon(folder: Path, model: nn.Module) -> set[str]:
    optimizer: Any = quiet_trainer(folder, model, optim="muon").create_optimizer()
    names = {id(one): name for name, one in model.named_parameters()}
    found = [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]
    assert sorted(functools.reduce(operator.iadd, found, [])) == sorted(names.values())
    return {
        name for names, group in zip(found, optimizer.param_groups, strict=True) if group[BY_MUON] for name in names
    }


def test_muon_steps_the_matrices_within_a_model(tmp_path: Path) -> None:
    assert stepped_by_muon(tmp_path, VectorClassifier()) == {"inner.weight"}
    bert = stepped_by_muon(tmp_path, tiny_bert_classifier())
    assert "bert.encoder.layer.0.attention.self.query.weight" in bert
    assert not any(part in name for name in bert for part in ("embeddings", "classifier", "bias", "LayerNorm"))
    swin = SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[1], num_heads=[2], window_size=4)
    assert not any("bias" in name for name in stepped_by_muon(tmp_path, SwinForImageClassification(swin)))
    attention = stepped_by_muon(tmp_path, nn.MultiheadAttention(4, 2))
    assert attention == {"in_proj_weight", "out_proj.weight"}
    gpt2 = stepped_by_muon(tmp_path, tiny_gpt2())
    assert gpt2 and not any(part in name for name in gpt2 for part in ("wte", "wpe", "lm_head", "ln_", "bias"))


def test_a_step_is_that_of_torchs_optimizers_each_over_its_parameters(tmp_path: Path) -> None:
    settings = {"learning_rate": 0.02, "weight_decay": 0.1, "adam_beta1": 0.8, "optim": "muon"}
    trainer = quiet_trainer(tmp_path, optim_args="momentum=0.9,ns_steps=4,adamw_lr=0.03,nesterov=false", **settings)
    other = VectorClassifier()
    other.load_state_dict(trainer.model.state_dict())
    others = [one for name, one in other.named_parameters() if name != "inner.weight"]
    decayed = [{"params": [other.head.weight], "weight_decay": 0.1}]
    plain = [{"params": [one for one in others if one is not other.head.weight], "weight_decay": 0.0}]
    parts = [
        torch.optim.Muon(*([other.inner.weight], 0.02, 0.1, 0.9, False), ns_steps=4, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([*decayed, *plain], lr=0.03, betas=(0.8, 0.999), fused=True),
    ]
    optimizer = trainer.create_optimizer()
    x, labels = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    for _ in range(3):
        for model, steppers in ((trainer.model, [optimizer]), (other, parts)):
            model.zero_grad()
            model(x, labels)["loss"].backward()
            for stepper in steppers:
                stepper.step()
    torch.testing.assert_close(trainer.model.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_a_resumed_training_ends_as_one_in_one_go_and_both_rates_follow_the_schedule(tmp_path: Path) -> None:
    def train(folder: Path, resume: bool, **changes: Any) -> Any:
        trainer = quiet_trainer(
            *(folder, None), optim="muon", optim_args="adamw_lr=0.001", save_strategy="steps", save_steps=2, **changes
        )
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
        return trainer

    whole, resumed = train(tmp_path, False, max_steps=5), train(tmp_path, True, max_steps=5)
    torch.testing.assert_close(whole.model.state_dict(), resumed.model.state_dict(), rtol=0, atol=0)
    halfway = train(tmp_path / "halfway", False, max_steps=4, lr_scheduler_type="constant_with_warmup", warmup_steps=8)
    assert {group["lr"] for group in halfway.optimizer.param_groups} == {0.01 / 2, 0.001 / 2}


def test_a_module_in_a_lightning_trainer_has_the_same_optimizer(tmp_path: Path) -> None:
    module = TransformersModule(tiny_bert_classifier(), quiet_arguments(tmp_path, optim="muon"))
    optimizer, _ = module.optimizer_and_schedule(10)
    assert type(optimizer) is MuonWithAdamW
    by_muon = [len(group["params"]) for group in optimizer.param_groups if group[BY_MUON]]
    ours: Any = quiet_trainer(tmp_path, tiny_bert_classifier(), optim="muon").create_optimizer()
    assert by_muon == [len(group["params"]) for group in ours.param_groups if group[BY_MUON]]


def test_a_group_that_is_added_is_stepped_by_adamw(tmp_path: Path) -> None:
    optimizer: Any = quiet_trainer(tmp_path, optim="muon").create_optimizer()
    added = nn.Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [added]})
    added.grad = torch.ones(2, 2)
    optimizer.step()
    assert not optimizer.param_groups[-1][BY_MUON] and bool((added < 1).all())


@pytest.mark.parametrize("changes", [{"fsdp": "full_shard"}, {"parallelism_config": {"tp_size": 2}}])
def test_sharded_matrices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any) -> None:
    args = quiet_arguments(tmp_path, optim="muon")
    for name, value in changes.items():
        setattr(args, name, value)
    monkeypatch.setattr(type(args), "world_size", 2)
    with pytest.raises(ValueError, match="optim='muon' needs each matrix as a whole"):
        get_optimizer_class_and_keywords(args, VectorClassifier())


def test_a_model_without_matrices_and_a_torch_without_muon_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = nn.LayerNorm(3)
    with pytest.raises(ValueError, match="found none"):
        MuonWithAdamW(
            [{"params": list(norm.parameters())}], by_adamw=norm.parameters(), lr=0.1, adamw_lr=0.1, betas=(0, 0), eps=1
        )
    monkeypatch.delattr(torch.optim, "Muon")
    monkeypatch.delitem(sys.modules, "littrainer.optim.muon")
    with pytest.raises(OptimizerNotInstalledError, match=r"torch>=2\.9"):
        get_optimizer_class_and_keywords(quiet_arguments(tmp_path, optim="muon"), VectorClassifier())
