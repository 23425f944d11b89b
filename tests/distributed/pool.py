"""The old place of `tests.ranks`."""

from tests.ranks import RankPool

__all__ = ["RankPool"]
