"""The answers about where two logs with these leader epochs diverge (rules R4, T15; KIP-320,
KIP-595).

The epochs are (1, 0) and (4, 10).  In some cases epoch 6 begins at 30, above the written end of 20.
`tests/unit/server/replica/test_divergence.py` compares pairs of logs whose common prefix is known.
"""

from __future__ import annotations

import pytest

from pk.log.divergence import (
    EpochEnd,
    StartAt,
    diverging_end,
    find_divergence,
    lacks_last_record,
    reader_divergence,
    truncation_offset,
)
from pk.log.epochs import LeaderEpochs
from pk.types import NONE, EpochStart

EPOCHS = LeaderEpochs([EpochStart(1, 0), EpochStart(4, 10)])
BEGUN = LeaderEpochs([*EPOCHS.entries, EpochStart(6, 30)])  # decided, and not yet written
UNKNOWN = LeaderEpochs()


@pytest.mark.parametrize(
    ("epochs", "last_epoch", "offset", "expected"),
    [
        (EPOCHS, 4, 20, None),
        (EPOCHS, 4, 21, EpochEnd(4, 20)),
        (EPOCHS, 1, 12, EpochEnd(1, 10)),
        (EPOCHS, 3, 5, EpochEnd(1, 10)),
        (EPOCHS, 5, 12, EpochEnd(NONE, 20)),
        (BEGUN, 4, 25, None),  # the records up to 30 are decided
        (UNKNOWN, 1, 5, EpochEnd(NONE, 20)),
    ],
)
def test_the_end_of_the_newest_common_epoch(
    epochs: LeaderEpochs, last_epoch: int, offset: int, expected: EpochEnd | None
) -> None:
    assert diverging_end(epochs, 20, last_epoch, offset) == expected


@pytest.mark.parametrize(
    ("epochs", "last_epoch", "offset", "expected"),
    [
        (EPOCHS, 4, 20, None),
        (EPOCHS, NONE, 0, None),
        (EPOCHS, NONE, 21, EpochEnd(4, 20)),
        (EPOCHS, 5, 12, EpochEnd(4, 12)),
        (EPOCHS, 5, 25, EpochEnd(4, 20)),
        (BEGUN, 4, 25, EpochEnd(4, 20)),  # it is not written: the leader may lose it
        (BEGUN, 5, 32, EpochEnd(4, 20)),
    ],
)
def test_a_follower_is_answered_with_what_is_written(
    epochs: LeaderEpochs, last_epoch: int, offset: int, expected: EpochEnd | None
) -> None:
    assert find_divergence(epochs, 0, 20, last_epoch, offset) == expected


@pytest.mark.parametrize(("last_epoch", "offset"), [(4, 9), (3, 15), (NONE, 3)])
def test_a_follower_below_the_known_epochs_begins_at_the_first_segment(
    last_epoch: int, offset: int
) -> None:
    # rule R5
    known = LeaderEpochs([EpochStart(4, 10)])
    assert find_divergence(known, 10, 20, last_epoch, offset) == StartAt(10)
    assert find_divergence(known, 10, 20, 4, 10) is None


@pytest.mark.parametrize(
    ("epochs", "last_epoch", "offset", "expected"),
    [
        (EPOCHS, NONE, 15, None),
        (EPOCHS, 4, 0, None),
        (EPOCHS, 4, 15, None),
        (EPOCHS, 1, 15, EpochEnd(1, 10)),
        (EPOCHS, 3, 5, EpochEnd(1, 5)),
        (EPOCHS, 5, 15, EpochEnd(4, 15)),
        (EPOCHS, 5, 25, EpochEnd(5, 20)),  # the records that were read are lost, with their epoch
        (UNKNOWN, 5, 15, None),
        (UNKNOWN, 5, 25, EpochEnd(5, 20)),
    ],
)
def test_a_reader_goes_back_to_what_is_left(
    epochs: LeaderEpochs, last_epoch: int, offset: int, expected: EpochEnd | None
) -> None:
    """KIP-320: the reader continues at the end of what both logs share."""
    assert reader_divergence(epochs, 20, last_epoch, offset) == expected


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (EpochEnd(4, 15), 15),
        (EpochEnd(4, 40), 20),
        (EpochEnd(2, 14), 10),
        (EpochEnd(2, 8), 10),  # the next round is about epoch 1
        (EpochEnd(1, 5), 5),
        (EpochEnd(NONE, 7), 7),
        (EpochEnd(NONE, 30), 20),
        (EpochEnd(9, 12), 12),
    ],
)
def test_a_follower_truncates_to_the_common_end(theirs: EpochEnd, expected: int) -> None:
    assert truncation_offset(EPOCHS, 20, theirs) == expected


@pytest.mark.parametrize(
    ("log_end", "end", "last_epoch", "lacks"),
    [
        (20, 20, 4, False),
        (20, 21, 4, True),
        (20, 10, 1, False),
        (20, 10, 4, True),
        (20, 11, 1, True),
    ],
)
def test_the_last_record_of_another_log(
    log_end: int, end: int, last_epoch: int, lacks: bool
) -> None:
    # rule T15
    assert lacks_last_record(EPOCHS, log_end, end, last_epoch) is lacks
    assert not lacks_last_record(UNKNOWN, end, end, last_epoch), "nothing to compare"
