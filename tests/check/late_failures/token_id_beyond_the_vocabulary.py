# Fails: train_dataset: row 777: input_ids: it has 40, and BertForSequenceClassification has 40 token
# Seen: https://github.com/huggingface/transformers/issues/12763
from small import TOKENS, arguments, pad, texts
from transformers import BertConfig, BertForSequenceClassification, Trainer

rows = texts(1000)
rows[777]["input_ids"][2] = TOKENS
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
model = BertForSequenceClassification(BertConfig(vocab_size=TOKENS, num_labels=3, **sizes))
Trainer(model, arguments(eval_strategy="no"), data_collator=pad, train_dataset=rows).train()
