"""`hyperparameter_search`: many trainings, each with other hyperparameters."""
