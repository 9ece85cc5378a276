"""`python -m llamamg`."""

import sys

from llamamg.start import main

sys.exit(main())
