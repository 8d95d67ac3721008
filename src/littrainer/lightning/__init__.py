"""The module and data module for Lightning users, and methods that Lightning adds to a Trainer."""
