# Fails: save: FileNotFoundError: [Errno 2] No such file or directory
import os
import shutil

from small import trainer
from transformers import TrainerCallback


class KeepsWeights(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        shutil.copy(os.path.join(folder, "pytorch_model.bin"), os.path.join(args.output_dir, "latest.bin"))


trainer(callbacks=[KeepsWeights()]).train()
