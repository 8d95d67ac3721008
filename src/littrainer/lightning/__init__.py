"""The modules for Lightning users, and methods that Lightning adds to a Trainer."""
