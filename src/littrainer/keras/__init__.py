"""`TFTrainer` for Keras 3 models on their torch backend."""
