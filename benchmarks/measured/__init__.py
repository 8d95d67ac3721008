"""One file for each benchmark: what is measured on a side, of which sizes, and the tables that show it."""
