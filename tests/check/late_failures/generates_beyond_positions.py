# Fails: longest generation, min_length=64: IndexError: index out of range in self
import torch
from small import TOKENS, arguments, pad, texts
from transformers import BartConfig, BartForConditionalGeneration, Seq2SeqTrainer, Seq2SeqTrainingArguments

sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
config = BartConfig(vocab_size=TOKENS, d_model=16, max_position_embeddings=16, **sizes, forced_eos_token_id=None)
rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"][:4]} for row in texts(30)]


def collate(rows):
    return {
        **pad([{"input_ids": row["input_ids"]} for row in rows]),
        "labels": pad([{"input_ids": row["labels"]} for row in rows])["input_ids"],
    }


args = arguments(Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=64)
model = BartForConditionalGeneration(config)
with torch.no_grad():
    # The model generates the end token at once.
    model.final_logits_bias[:, config.eos_token_id] = 100.0
trainer = Seq2SeqTrainer(model, args, data_collator=collate, train_dataset=rows, eval_dataset=rows)
trainer.compute_metrics = lambda prediction: {"tokens": float((prediction.predictions > 0).sum())}
trainer.train()
