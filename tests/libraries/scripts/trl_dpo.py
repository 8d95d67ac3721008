"""Direct preference optimization with TRL, in several set-ups."""

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

QUESTIONS = ["what is the capital of france ?", "how many legs has a spider ?", "please write a poem about the sea ."]
GOOD = [" paris is the capital of france .", " a spider has eight legs .", " the wind and the rain ."]
BAD = [" no thank you", " maybe bad", " the lazy dog jumps"]
PAIRS = Dataset.from_dict(
    {
        "prompt": [QUESTIONS[i % 3] for i in range(10)],
        "chosen": [GOOD[i % 3] + " yes" * (i % 4) for i in range(10)],
        "rejected": [BAD[(i + i // 3) % 3] for i in range(10)],
    }
)
CHATS = Dataset.from_dict(
    {
        "prompt": [[{"role": "user", "content": QUESTIONS[i % 3]}] for i in range(6)],
        "chosen": [[{"role": "assistant", "content": GOOD[i % 3].strip()}] for i in range(6)],
        "rejected": [[{"role": "assistant", "content": BAD[i % 3].strip()}] for i in range(6)],
    }
)


def train(name, train_dataset, model="models/llama", ref_model=None, peft_config=None, **settings):
    settings = {"per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 5e-3, "bf16": False, **settings}
    trainer = DPOTrainer(
        model=model,
        ref_model=ref_model,
        args=DPOConfig(output_dir=name, report_to="none", **settings),
        train_dataset=train_dataset,
        eval_dataset=PAIRS.select(range(3)) if settings.get("eval_strategy") else None,
        peft_config=peft_config,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()


# Five micro-batches an epoch: the last window has a single micro-batch.
train(
    "accumulation",
    PAIRS,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
)
train(
    "given_reference",
    PAIRS,
    model=AutoModelForCausalLM.from_pretrained("models/llama"),
    ref_model=AutoModelForCausalLM.from_pretrained("models/reference"),
    sync_ref_model=True,
    ref_model_sync_steps=2,
    bf16=True,
    use_cpu=True,
    max_steps=4,
    save_strategy="no",
)
train(
    "precomputed",
    PAIRS,
    precompute_ref_log_probs=True,
    loss_type=["sigmoid", "sft"],
    loss_weights=[1.0, 0.5],
    eval_strategy="steps",
    eval_steps=2,
    max_steps=3,
    save_strategy="no",
)
train(
    "lora",
    CHATS,
    peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    loss_type="ipo",
    max_steps=3,
    save_strategy="no",
)
