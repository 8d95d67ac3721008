"""`hyperparameter_search`: many trainings, each with hyperparameters of its own."""
