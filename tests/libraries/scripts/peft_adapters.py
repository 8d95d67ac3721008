"""Adapters of PEFT trained with a plain Trainer, in several set-ups."""

import json
import random
from pathlib import Path

import torch
from peft import (
    AdaLoraConfig,
    AdamssConfig,
    LoraConfig,
    MontecloraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from peft.helpers import MontecloraTrainerMixin, rescale_adapter_scale
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.adamss.asa_callback import AdamssAsaCallback
from small_bert import bert_tokenizer, copy_parameter_memory, sentence, write_bert
from transformers import (
    BertForSequenceClassification,
    BertLMHeadModel,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

QUICK = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "seed": 7,
}
LORA = LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["query", "value"])


def rows(count, seed):
    draws, tokenizer = random.Random(seed), bert_tokenizer()
    return [{**tokenizer(sentence(draws)), "labels": draws.randrange(3)} for _ in range(count)]


def classifier():
    folder = write_bert(BertForSequenceClassification, num_labels=3)
    return copy_parameter_memory(BertForSequenceClassification.from_pretrained(folder))


def add_adapter(config, model=None):
    torch.manual_seed(1)
    return get_peft_model(classifier() if model is None else model, config)


class VariationalTrainer(MontecloraTrainerMixin, Trainer):
    """A Trainer whose loss PEFT adds a term to."""


def trainer_of(model, name, trainer_class=Trainer, **settings):
    keywords = {key: settings.pop(key) for key in ("callbacks", "optimizers") if key in settings}
    return trainer_class(
        model=model,
        args=TrainingArguments(output_dir=name, **{**QUICK, **settings}),
        train_dataset=rows(14, 1),
        eval_dataset=rows(6, 2),
        data_collator=DataCollatorWithPadding(bert_tokenizer()),
        compute_metrics=lambda prediction: {
            "accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())
        },
        **keywords,
    )


def finish(trainer, name, **keywords):
    trainer.train(**keywords)
    trainer.save_model()
    trainer.save_state()
    predicted = trainer.predict(rows(5, 3))
    names = sorted(get_peft_model_state_dict(trainer.model))
    results = {"logits": predicted.predictions.tolist(), "metrics": predicted.metrics, "names": names}
    Path(name, "adapter_results.json").write_text(json.dumps(results))


def lora():
    """Accumulation, evaluations, the best of the checkpoints, and a run that resumes from one."""
    settings = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
    trainer = trainer_of(add_adapter(LORA), "lora", **settings, save_steps=2, load_best_model_at_end=True)
    finish(trainer, "lora")
    again = trainer_of(add_adapter(LORA), "lora_resumed", **settings, save_steps=50)
    finish(again, "lora_resumed", resume_from_checkpoint="lora/checkpoint-2")
    loaded = PeftModel.from_pretrained(classifier(), "lora")
    with rescale_adapter_scale(loaded, 0.5):
        trainer = trainer_of(loaded, "lora_rescaled")
        Path("lora_rescaled", "eval_results.json").write_text(json.dumps(trainer.evaluate()))


def lora_plus():
    """Another learning rate for one of LoRA's two matrices; gradient checkpointing."""
    model = add_adapter(LORA)
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=4.0)
    finish(trainer_of(model, "lora_plus", optimizers=(optimizer, None), gradient_checkpointing=True), "lora_plus")


def prompts():
    """Virtual tokens before a language model's text, which labels and logits do not have the length of."""
    folder = write_bert(BertLMHeadModel, is_decoder=True)
    base = copy_parameter_memory(BertLMHeadModel.from_pretrained(folder))
    model = add_adapter(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), base)
    texts = [{"input_ids": row["input_ids"][:5], "labels": row["input_ids"][:5]} for row in rows(14, 4)]
    args = TrainingArguments(output_dir="prompts", **QUICK, eval_strategy="epoch")
    trainer = Trainer(model=model, args=args, train_dataset=texts, eval_dataset=texts[:5])
    trainer.train()
    trainer.save_model()
    trainer.save_state()


def adamss():
    """A callback of PEFT's own that hands on to TrainerCallback by keyword."""
    config = AdamssConfig(
        task_type="SEQ_CLS",
        r=8,
        num_subspaces=3,
        subspace_rank=1,
        use_asa=True,
        asa_target_subspaces=2,
        init_warmup=1,
        final_warmup=6,
        mask_interval=2,
        target_modules=["query", "value"],
    )
    finish(trainer_of(add_adapter(config), "adamss", callbacks=[AdamssAsaCallback()]), "adamss")


class Allocation(TrainerCallback):
    """Makes the call that PEFT's documentation requires after each optimizer step, with gradients."""

    def on_optimizer_step(self, args, state, control, model, **kwargs):
        model.base_model.update_and_allocate(state.global_step)


def adalora():
    """Ranks that a callback gives to layers by their gradients."""
    config = AdaLoraConfig(
        task_type="SEQ_CLS", init_r=4, target_r=2, tinit=1, tfinal=2, total_step=8, target_modules=["query", "value"]
    )
    finish(trainer_of(add_adapter(config), "adalora", callbacks=[Allocation()]), "adalora")


def monteclora():
    """Random draws around the adapter's weights, and a loss of PEFT's added to the model's."""
    config = LoraConfig(
        task_type="SEQ_CLS", r=4, target_modules=["query", "value"], monteclora_config=MontecloraConfig(num_samples=2)
    )
    trainer = trainer_of(add_adapter(config), "monteclora", VariationalTrainer, eval_strategy="epoch")
    finish(trainer, "monteclora")


if __name__ == "__main__":
    lora()
    lora_plus()
    prompts()
    adamss()
    adalora()
    monteclora()
