"""python -m kvswap: the same as the kvswap command."""

import sys

from kvswap.cli import main

sys.exit(main())
