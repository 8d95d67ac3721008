"""Group relative policy optimization with TRL and reward functions of the script's own."""

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

PROMPTS = ["what is the capital of france ?", "how many legs has a spider ?", "please write a poem about the sea ."]
QUESTIONS = Dataset.from_dict({"prompt": [PROMPTS[i % 3] for i in range(12)], "expected": ["the", "a", "yes"] * 4})
CHATS = Dataset.from_dict({"prompt": [[{"role": "user", "content": PROMPTS[i % 3]}] for i in range(8)]})


def count_distinct_words(completions, **kwargs):
    return [float(len(set(str(completion).split()))) for completion in completions]


def has_expected_word(completions, expected, trainer_state, log_metric, **kwargs):
    log_metric("steps_done", float(trainer_state.global_step))
    return [1.0 if word in completion.split() else 0.0 for completion, word in zip(completions, expected, strict=True)]


def train(name, train_dataset, reward_funcs, peft_config=None, resume=False, **settings):
    shared = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "logging_steps": 1,
        "learning_rate": 5e-3,
        "bf16": False,
    }
    trainer = GRPOTrainer(
        model="models/llama",
        reward_funcs=reward_funcs,
        args=GRPOConfig(output_dir=name, report_to="none", **{**shared, **settings}),
        train_dataset=train_dataset,
        eval_dataset=train_dataset.select(range(4)) if settings.get("eval_strategy") else None,
        peft_config=peft_config,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    trainer.save_state()


iterations = {
    "use_adaptive_entropy": True,
    "entropy_target": 5.0,
    "entropy_coef_delta": 0.05,
    "num_iterations": 2,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "beta": 0.04,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "per_device_eval_batch_size": 4,
}
train(
    "iterations",
    QUESTIONS,
    [count_distinct_words, has_expected_word],
    max_steps=6,
    save_strategy="steps",
    save_steps=4,
    log_completions=True,
    **iterations,
)
train(
    "resumed",
    QUESTIONS,
    [count_distinct_words, has_expected_word],
    resume="iterations/checkpoint-4",
    max_steps=6,
    save_strategy="no",
    **iterations,
)
train("defaults", CHATS, count_distinct_words, bf16=None, use_cpu=True, max_steps=2, save_strategy="no")
train(
    "synchronized",
    QUESTIONS,
    count_distinct_words,
    beta=0.1,
    sync_ref_model=True,
    ref_model_sync_steps=1,
    loss_type="grpo",
    mask_truncated_completions=True,
    gradient_accumulation_steps=2,
    max_steps=3,
    save_strategy="steps",
    save_steps=2,
)
train(
    "lora",
    CHATS,
    count_distinct_words,
    peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    beta=0.04,
    max_steps=2,
    save_strategy="no",
)
