"""`python -m semaug` runs the command line."""

import sys

from semaug.cli.main import main

sys.exit(main())
