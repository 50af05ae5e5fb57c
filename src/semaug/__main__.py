"""`python -m semaug` runs the command line."""

import sys

from semaug.cli.main import main

if __name__ == "__main__":  # not in worker processes, which import this module
    sys.exit(main())
