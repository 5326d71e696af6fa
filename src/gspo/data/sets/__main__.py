"""``python -m gspo.data.sets DIRECTORY`` writes the sets."""

import sys
from pathlib import Path

from gspo.data.sets import write_sets

for path in write_sets(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)):
    print(path)
