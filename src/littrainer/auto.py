"""`import littrainer.auto` before any import of transformers replaces its Trainer API by littrainer's.

The replacement is also active in Python processes that this process starts.
"""

from littrainer.redirection.redirect import install

install()
