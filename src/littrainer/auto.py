"""`import littrainer.auto`, written before any import of transformers, turns its Trainer API into littrainer's.

It holds for the rest of the process and for the Python processes that it starts.
"""

from littrainer.redirection.redirect import install

install()
