"""Which attention rank serves a request. Knows nothing of a rank but its load."""

from collections.abc import Sequence


def choose_rank(loads: Sequence[int]) -> int:
    """Return the rank with the fewest outstanding tokens (`Scheduler.load`), the lowest one on ties.

    The caller adds `Request.max_tokens` to the load of that rank before it asks for the next request.
    """
    return min(range(len(loads)), key=loads.__getitem__)
