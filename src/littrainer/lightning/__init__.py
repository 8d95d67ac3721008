"""What Lightning users import, and what Lightning adds to a Trainer."""
