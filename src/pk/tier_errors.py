"""The errors of the copies that a restore reads.  Use them by their names in errors.py, which has
their tree.
"""

from __future__ import annotations

from pk.error_bases import OperatorError


class TierOfAnotherCluster(OperatorError):
    """The copies below `_cluster/` in the tier belong to another cluster of the same id."""

    code = 1078
