"""`python -m semaug` is `semaug`."""

import sys

from semaug.cli.main import main

sys.exit(main())
