# Fails: evaluation: KeyError: "metric_for_best_model='news_f1' means 'eval_news_f1', which is not found
# Seen: https://github.com/hiyouga/LlamaFactory/issues/7906
from small import texts, trainer

changes = {"load_best_model_at_end": True, "metric_for_best_model": "news_f1"}
trainer(changes=changes, eval_dataset={"news": texts(10, 1), "mail": texts(9, 2)}).train()
