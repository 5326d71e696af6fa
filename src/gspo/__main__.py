"""``python -m gspo``, the same as ``gspo``."""

import sys

from gspo.cli import main

if __name__ == "__main__":
    sys.exit(main())
