"""The errors of what is stored in the tier, and of a restore from it.  Use them by their names in
errors.py, which has their tree.
"""

from __future__ import annotations

from pk.error_bases import OperatorError


class SnapshotUnusable(OperatorError):
    """A topic has no snapshot of its latest values, or it is too old, damaged, or was changed: run
    the job `snapshot`.
    """

    code = 1071


class DamagedTierFile(OperatorError):
    """A data file of a topic's table is missing, or its bytes have changed."""

    code = 1050


class TierOfAnotherCluster(OperatorError):
    """The copies below `_cluster/` in the tier belong to another cluster of the same id."""

    code = 1078


class NothingToRestore(OperatorError):
    """The tier has no copy of the metadata of such a cluster."""

    code = 1079


class ClusterAlive(OperatorError):
    """A node of the cluster that is to be restored answers: `--fence` ends its use of the tier."""

    code = 1080


class RestoreUnderWay(OperatorError):
    """Another restore of the cluster has begun, or was interrupted."""

    code = 1081


class ClusterRestored(OperatorError):
    """This cluster was restored from its tier as another one, and must be stopped."""

    code = 1082
