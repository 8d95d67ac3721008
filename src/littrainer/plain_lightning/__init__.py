"""What a Lightning user takes into a program of their own, and the ways between it and the Trainer."""
