"""Trainers of TRL that override loops, logging and the callback handler."""

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer, DPOConfig, RLOOConfig, RLOOTrainer
from trl.experimental.bema_for_ref_model import BEMACallback, DPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

PROMPTS = ["what is the capital of france ?", "how many legs has a spider ?", "please write a poem about the sea ."]
COMPLETIONS = ["paris is the capital of france .", "a spider has eight legs .", "the wind and the rain ."]
QUESTIONS = Dataset.from_dict({"prompt": [PROMPTS[i % 3] for i in range(10)]})
PAIRS = Dataset.from_dict(
    {
        "prompt": [PROMPTS[i % 3] for i in range(10)],
        "chosen": [" " + COMPLETIONS[i % 3] for i in range(10)],
        "rejected": [" " + COMPLETIONS[(i + 1) % 3] for i in range(10)],
    }
)
CHATS = Dataset.from_dict(
    {
        "messages": [
            [{"role": "user", "content": PROMPTS[i % 3]}, {"role": "assistant", "content": COMPLETIONS[i % 3]}]
            for i in range(10)
        ]
    }
)
SHARED = {
    "report_to": "none",
    "logging_steps": 1,
    "learning_rate": 5e-3,
    "per_device_train_batch_size": 2,
    "bf16": False,
}


def count_distinct_words(prompts, completions, **kwargs):
    return [float(len(set(str(completion).split()))) for completion in completions]


def tokenizer():
    return AutoTokenizer.from_pretrained("models/llama", padding_side="left")


def finish(trainer):
    trainer.train()
    trainer.save_model()
    trainer.save_state()


finish(
    OnlineDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained("models/llama"),
        reward_funcs=count_distinct_words,
        args=OnlineDPOConfig(
            output_dir="online_dpo",
            max_new_tokens=6,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            save_strategy="steps",
            save_steps=2,
            eval_strategy="no",
            **SHARED,
        ),
        train_dataset=QUESTIONS,
        processing_class=tokenizer(),
    )
)
finish(
    GKDTrainer(
        model="models/llama",
        teacher_model="models/reference",
        args=GKDConfig(
            output_dir="gkd", max_new_tokens=6, gradient_accumulation_steps=2, max_steps=3, save_strategy="no", **SHARED
        ),
        train_dataset=CHATS,
        eval_dataset=CHATS.select(range(2)),
        processing_class=tokenizer(),
    )
)
finish(
    DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained("models/llama"),
        ref_model=AutoModelForCausalLM.from_pretrained("models/reference"),
        args=DPOConfig(output_dir="bema", max_steps=4, save_strategy="no", **SHARED),
        train_dataset=PAIRS,
        processing_class=tokenizer(),
        callbacks=[BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=2)],
    )
)
finish(
    RLOOTrainer(
        model="models/llama",
        reward_funcs=count_distinct_words,
        args=RLOOConfig(
            output_dir="rloo",
            max_completion_length=6,
            num_generations=2,
            num_iterations=2,
            max_steps=4,
            save_strategy="no",
            **SHARED,
        ),
        train_dataset=QUESTIONS,
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
)
finish(
    DistillationTrainer(
        model="models/llama",
        teacher_model="models/reference",
        args=DistillationConfig(
            output_dir="distillation",
            max_completion_length=6,
            gradient_accumulation_steps=2,
            max_steps=3,
            save_strategy="no",
            **SHARED,
        ),
        train_dataset=QUESTIONS,
    )
)
finish(
    ORPOTrainer(
        model=AutoModelForCausalLM.from_pretrained("models/llama"),
        args=ORPOConfig(
            output_dir="orpo",
            max_length=32,
            gradient_accumulation_steps=2,
            eval_strategy="epoch",
            save_strategy="no",
            **SHARED,
        ),
        train_dataset=PAIRS,
        eval_dataset=PAIRS.select(range(3)),
        processing_class=tokenizer(),
    )
)
