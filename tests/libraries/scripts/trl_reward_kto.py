"""A reward model and Kahneman-Tversky optimization with TRL."""

from datasets import Dataset
from peft import LoraConfig
from trl import KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

QUESTIONS = ["what is the capital of france ?", "how many legs has a spider ?", "please write a poem about the sea ."]
GOOD = ["paris is the capital of france .", "a spider has eight legs .", "the wind and the rain ."]
BAD = ["no thank you", "maybe bad", "the lazy dog jumps"]


def chat(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


PAIRS = Dataset.from_dict(
    {
        "chosen": [chat(QUESTIONS[i % 3], GOOD[i % 3]) for i in range(10)],
        "rejected": [chat(QUESTIONS[i % 3], BAD[(i + i // 3) % 3]) for i in range(10)],
    }
)
RATED_CHATS = Dataset.from_dict(
    {
        "prompt": [QUESTIONS[i % 3] + " please" * (i % 2) for i in range(11)],
        "completion": [" " + (GOOD if i % 3 != 1 else BAD)[i % 3] for i in range(11)],
        "label": [i % 3 != 1 for i in range(11)],
    }
)
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
SHARED = {"report_to": "none", "logging_steps": 1, "learning_rate": 5e-3, "per_device_train_batch_size": 2}


def finish(trainer):
    trainer.train()
    trainer.save_model()
    trainer.save_state()


def reward(name, peft_config=None, **settings):
    finish(
        RewardTrainer(
            model="models/reward",
            args=RewardConfig(output_dir=name, bf16=False, center_rewards_coefficient=0.1, **SHARED, **settings),
            train_dataset=PAIRS,
            eval_dataset=PAIRS.select(range(5)),
            peft_config=peft_config,
        )
    )


def kto(name, **settings):
    settings = {"bf16": False, **SHARED, **settings}
    finish(
        KTOTrainer(
            model="models/llama",
            args=KTOConfig(output_dir=name, **settings),
            train_dataset=RATED_CHATS,
            eval_dataset={"one": RATED_CHATS.select(range(4)), "two": RATED_CHATS.select(range(4, 9))},
        )
    )


reward(
    "reward",
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    metric_for_best_model="eval_accuracy",
)
reward("reward_lora", peft_config=LORA, max_steps=3, save_strategy="no")
# Six micro-batches an epoch.
kto("kto", gradient_accumulation_steps=4, num_train_epochs=2, eval_strategy="epoch", save_strategy="epoch")
kto("kto_apo", loss_type="apo_zero_unpaired", bf16=True, use_cpu=True, max_steps=3, save_strategy="no")
kto("kto_precomputed", precompute_ref_log_probs=True, max_steps=3, save_strategy="no")
