"""`littrainer explain`: what arguments turn into, in words and as a plain Lightning program."""
