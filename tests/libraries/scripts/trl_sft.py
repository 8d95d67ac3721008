"""Supervised fine-tuning with TRL, in several set-ups."""

import numpy as np
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "what is the capital of france ? paris is the capital of france .",
    "how many legs has a spider ? a spider has eight legs .",
    "please write a short poem about the sea , the wind and the rain .",
    "good answer yes thank you",
]
TEXTS = Dataset.from_dict({"text": [SENTENCES[i % 5] + " yes" * (i % 3) for i in range(14)]})
CHATS = Dataset.from_dict(
    {
        "messages": [
            [
                {"role": "user", "content": SENTENCES[i % 5]},
                {"role": "assistant", "content": SENTENCES[(i + 1) % 5]},
            ]
            for i in range(10)
        ]
    }
)


LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)


def mean_logit(prediction):
    return {"mean_logit": float(np.mean(prediction.predictions)), "rows": len(prediction.label_ids)}


def train(name, train_dataset, resume=False, peft_config=None, compute_metrics=None, **settings):
    settings = {"per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-2, **settings}
    trainer = SFTTrainer(
        model="models/llama",
        args=SFTConfig(output_dir=name, report_to="none", **settings),
        train_dataset=train_dataset,
        eval_dataset={"one": TEXTS.select(range(5)), "two": CHATS.select(range(3))},
        compute_metrics=compute_metrics,
        peft_config=peft_config,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    trainer.save_metrics("eval", trainer.evaluate(CHATS.select(range(3))))
    trainer.save_state()


# Seven micro-batches an epoch: the last window has a single micro-batch.
train(
    "accumulation",
    TEXTS,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    bf16=False,
    eval_strategy="steps",
    eval_steps=3,
    save_strategy="steps",
    save_steps=3,
)
train(
    "resumed",
    TEXTS,
    resume="accumulation/checkpoint-3",
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    bf16=False,
    eval_strategy="steps",
    eval_steps=3,
    save_strategy="no",
)
train("defaults", TEXTS, use_cpu=True, max_steps=3, save_strategy="no")
train("packing", TEXTS, packing=True, max_length=24, padding_free=True, bf16=False, max_steps=3, save_strategy="no")
train("assistant_only", CHATS, assistant_only_loss=True, bf16=False, max_steps=3, loss_type="dft")
train(
    "metrics",
    CHATS,
    compute_metrics=mean_logit,
    bf16=False,
    max_steps=4,
    per_device_eval_batch_size=2,
    eval_strategy="steps",
    eval_steps=1,
    save_strategy="best",
    metric_for_best_model="one_mean_logit",
    load_best_model_at_end=True,
)
train("stream", TEXTS.to_iterable_dataset(), gradient_accumulation_steps=2, bf16=False, max_steps=5, save_strategy="no")
lora = {"bf16": False, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
train("lora", CHATS, peft_config=LORA, load_best_model_at_end=True, metric_for_best_model="two_loss", **lora)
train("lora_resumed", CHATS, resume="lora/checkpoint-2", peft_config=LORA, **lora)
