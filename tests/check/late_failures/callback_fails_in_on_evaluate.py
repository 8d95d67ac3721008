# Fails: evaluation: KeyError: 'eval_f1'
from small import trainer
from transformers import TrainerCallback


class Watches(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        control.should_training_stop = metrics["eval_f1"] > 0.99


trainer(callbacks=[Watches()]).train()
