"""Elo ratings on past contests of Codeforces.

The parts: ``contest`` (one contest from the API's answers, checked), ``files`` and
``open_r1`` (what the user brings), ``scoring``
(points, penalty and rank over all orders of the samples), ``summary`` (the rating with its interval), ``benchmark`` (as
``gspo eval`` sees it). The equations are in ``gspo.evals.elo``. See docs/codeforces.md.
"""

from gspo.evals.codeforces.benchmark import CODEFORCES, OWN_CONTESTS

__all__ = ["CODEFORCES", "OWN_CONTESTS"]
