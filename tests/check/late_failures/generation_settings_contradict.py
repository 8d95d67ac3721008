# Fails: save: ValueError: GenerationConfig is invalid
# Seen: https://github.com/huggingface/transformers/issues/29988
from small import TOKENS, arguments, pad, texts
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

rows = [{"input_ids": row["input_ids"]} for row in texts()]


def collate(rows):
    batch = pad(rows)
    return {**batch, "labels": batch["input_ids"]}


model = GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, n_embd=16, n_layer=1, n_head=2, n_positions=32))
model.generation_config.temperature = 0.2
Trainer(model, arguments(eval_strategy="no"), data_collator=collate, train_dataset=rows).train()
