# Fails: disk: 10 checkpoints of
import shutil

from small import trainer

# A disk with room for two checkpoints.
usage = shutil.disk_usage
shutil.disk_usage = lambda path: usage(path)._replace(free=150_000)
trainer(changes={"num_train_epochs": 10}).train()
