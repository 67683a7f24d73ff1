"""Which control streams a listener keeps (wire/stream_quotas)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk.wire.stream_quotas import StreamQuotas

STREAMS, SILENT = 12, 6


def test_streams_beyond_the_bound_are_turned_away() -> None:
    """wire/stream_quotas N15; the place of one that ended is free."""
    quotas: StreamQuotas[int, str] = StreamQuotas(2, 2)
    assert [quotas.begin(number, "a") for number in range(3)] == [None, None, 2]
    quotas.end(0)
    assert quotas.begin(3, "b") is None
    assert len(quotas) == 2


def test_a_connection_with_more_than_its_share_loses_its_own_oldest_stream() -> None:
    quotas: StreamQuotas[str, str] = StreamQuotas(100, 4)
    for stream in ("shy", "loud1", "loud2", "loud3"):
        assert quotas.begin(stream, stream[:4]) is None
    assert quotas.begin("loud4", "loud") == "loud1"
    assert quotas.begin("loud5", "loud") == "loud2"
    assert quotas.begin("late", "late") == "shy", "no connection but the loud one has too many"


def test_what_has_arrived_protects_a_stream() -> None:
    quotas: StreamQuotas[int, str] = StreamQuotas(100, 2)
    for number in range(50):
        assert quotas.begin(number, "a") is None
        quotas.hear(number)
    assert quotas.silent == 0
    assert len(quotas) == 50


def test_streams_of_a_connection_that_is_gone_are_kept_apart_from_none() -> None:
    """A grpc connection may have ended before its stream begins: it is then None."""
    quotas: StreamQuotas[int, str | None] = StreamQuotas(100, 1)
    assert quotas.begin(1, None) is None
    quotas.hear(1)
    assert quotas.begin(2, None) is None
    assert quotas.begin(3, None) == 2


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "hear", "end"]), st.integers(0, 30), st.integers(0, 4))
    )
)
def test_the_bounds_hold_in_every_history(events: list[tuple[str, int, int]]) -> None:
    """wire/stream_quotas N15, N16, against sets."""
    quotas: StreamQuotas[int, int] = StreamQuotas(STREAMS, SILENT)
    open_, silent = set[int](), dict[int, int]()
    for what, stream, connection in events:
        if what == "begin" and stream not in open_:
            before = dict(silent)
            loser = quotas.begin(stream, connection)
            assert (loser == stream) == (len(open_) == STREAMS) or loser in {*before, stream}
            if len(open_) == STREAMS:
                assert loser == stream
                continue
            open_.add(stream)
            silent[stream] = connection
            assert (loser is None) == (len(silent) <= SILENT)
            if loser is not None:
                held = list(silent.values())
                share = SILENT // len(set(held))
                if held.count(connection) > share:
                    assert silent[loser] == connection
                del silent[loser]
        elif what == "hear":
            quotas.hear(stream)
            silent.pop(stream, None)
        elif what == "end":
            quotas.end(stream)
            open_.discard(stream)
            silent.pop(stream, None)
        assert (len(quotas), quotas.silent) == (len(open_), len(silent))
        assert len(quotas) <= STREAMS
        assert quotas.silent <= SILENT


@pytest.mark.parametrize("call", ["hear", "end"])
def test_a_stream_that_is_not_known_changes_nothing(call: str) -> None:
    quotas: StreamQuotas[int, str] = StreamQuotas(2, 2)
    getattr(quotas, call)(7)
    assert (len(quotas), quotas.silent) == (0, 0)
