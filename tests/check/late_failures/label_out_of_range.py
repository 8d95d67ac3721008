# Fails: train_dataset: row 901: labels: it has 3, and BertForSequenceClassification has 3 classes
from small import CLASSES, TOKENS, arguments, padded, texts
from transformers import BertConfig, BertForSequenceClassification, Trainer

rows = texts(1000)
rows[901]["labels"] = CLASSES
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
model = BertForSequenceClassification(BertConfig(vocab_size=TOKENS, num_labels=CLASSES, **sizes))
Trainer(model, arguments(eval_strategy="no"), data_collator=padded, train_dataset=rows).train()
