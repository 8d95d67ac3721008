"""The process of a trial, and the pool of them that carries out several trials at once."""
