"""Small problem sets of our own: made by seed, proved right, shipped with the package under its licence.

``integers``: 60 problems with integer answers; ``programs``: 24 programming problems with tests; ``contests``: 6
contests in the form of the Codeforces API. ``python -m gspo.data.sets DIRECTORY`` makes the files again.
"""

from gspo.data.sets.files import NAMES, SEED, load_set, make_set, set_path, write_sets

__all__ = ["NAMES", "SEED", "load_set", "make_set", "set_path", "write_sets"]
