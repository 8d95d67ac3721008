"""What a Lightning user takes into a program of their own, and what Lightning gives a Trainer besides."""
