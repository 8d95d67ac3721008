"""`python -m littrainer`, the same as the `littrainer` command."""

import sys

from littrainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
