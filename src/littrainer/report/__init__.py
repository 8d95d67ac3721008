"""`littrainer report`: what a training logged, as one HTML page and one picture."""
