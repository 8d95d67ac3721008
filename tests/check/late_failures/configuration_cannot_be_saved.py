# Fails: save: TypeError: Object of type set is not JSON serializable
from small import TOKENS, arguments, padded, texts
from transformers import BertConfig, BertForSequenceClassification, Trainer

sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
config = BertConfig(vocab_size=TOKENS, num_labels=3, **sizes, languages={"de", "fr"})
args = arguments(eval_strategy="no")
Trainer(BertForSequenceClassification(config), args, data_collator=padded, train_dataset=texts()).train()
