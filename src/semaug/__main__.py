"""`python -m semaug` is `semaug`."""

import sys

from semaug.cli import main

sys.exit(main())
