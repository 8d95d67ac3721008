"""`TFTrainer` of the first edition of the interface, for Keras 3 models on their torch backend."""
