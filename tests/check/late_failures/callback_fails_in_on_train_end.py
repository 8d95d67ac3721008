# Fails: end of training: TypeError: type NoneType doesn't define __round__ method
from small import trainer
from transformers import TrainerCallback


class Reports(TrainerCallback):
    def on_train_end(self, args, state, control, **kwargs):
        print("best:", round(state.best_metric, 3))


trainer(callbacks=[Reports()]).train()
