"""`python -m llamamg`."""

import sys

from llamamg.cli import main

sys.exit(main())
