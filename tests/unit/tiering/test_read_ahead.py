"""tiering/read_ahead: the windows of clients that read straight on, bounded and shared."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pk.tiering import read_ahead
from pk.tiering.read_ahead import ReadAhead, Unread

MIB = 1024 * 1024
ROWS = 100  #: of a row group


def group_at(offset: int, size: int = MIB, *, stored: int = 500) -> Unread:
    number = offset // ROWS
    return Unread(("file", number), number * ROWS + ROWS - 1, size, stored)


class Clients:
    """Clients that read one partition; what is read ahead lands only if `land` is called."""

    def __init__(self, bytes_max: int = 64 * MIB, *, apart: bool = True) -> None:
        self.core = ReadAhead(bytes_max)
        self.now_ms = 0
        self.apart = apart  #: each client has row groups of its own
        self.loading: list[object] = []
        self.at: dict[int, int] = {}

    def read(self, client: int, start: int | None = None, *, waited: bool = True) -> list[Unread]:
        """Read one row group; return what is to be read ahead."""
        start = self.at.get(client, 0) if start is None else start
        end = self.at[client] = start + ROWS
        served = self.core.served(client, start, end, MIB, self.now_ms, waited=waited)
        found = []
        while served.straight_on and (at := self.core.position(client)) is not None:
            group = group_at(at)
            if self.apart:
                group = group._replace(key=(client, group.key))
            if not self.core.take(client, group):
                break
            if self.core.is_loading(group.key) and group.key not in self.loading:
                self.loading.append(group.key)
                found.append(group)
            self.core.passed(client, group.max_offset + 1)
        return found

    def land(self) -> None:
        for key in self.loading:
            self.core.landed(key)
        self.loading.clear()


def test_the_window_begins_with_the_second_read_and_doubles_while_reads_wait() -> None:
    it = Clients()
    assert [len(it.read(1)) for _ in range(6)] == [0, 2, 2, 2, 2, 2]  # 2, 3, 4, 5, 6: all it read
    assert it.core._readers[1].unread_bytes == 6 * MIB
    for _ in range(30):
        it.read(1)
        it.land()
    assert it.core._readers[1].unread_bytes == read_ahead.WINDOW_MAX_BYTES


def test_the_window_of_a_near_store_stays_small() -> None:
    it = Clients()
    for _ in range(20):
        it.read(1, waited=False)
        it.land()
    assert it.core.bytes == read_ahead.WINDOW_FIRST_BYTES


def test_a_seek_gives_the_window_back() -> None:
    it = Clients()
    for _ in range(4):
        it.read(1)
    it.land()
    assert it.core.bytes == 4 * MIB
    served = it.core.served(1, 5_000, 5_100, MIB, 0, waited=True)
    assert len(served.abandoned) == 4
    assert not served.straight_on
    assert (it.core.bytes, it.core.wasted_bytes) == (0, 4 * 500)
    assert not it.core.take(1, group_at(5_100))


def test_an_abandoned_load_keeps_its_memory_until_it_lands() -> None:
    it = Clients()
    for _ in range(3):
        it.read(1)
    it.read(1, 5_000)
    assert it.core.bytes == it.core.loading_bytes > 0
    it.land()
    assert it.core.bytes == it.core.loading_bytes == 0


def test_a_client_that_left_gives_its_window_back() -> None:
    it = Clients()
    for _ in range(4):
        it.read(1)
    it.land()
    it.now_ms = read_ahead.IDLE_MS
    it.read(2)
    assert it.core.bytes == 0
    assert it.core.position(1) is None


def test_clients_behind_each_other_share_row_groups() -> None:
    it = Clients(apart=False)
    for _ in range(4):
        it.read(1)
    assert [it.read(2) for _ in range(3)] == [[], [], []]  # client 1 has asked for all of it
    it.land()
    it.read(1, 9_000)
    assert it.core.wasted_bytes == 2 * 500  # client 2 reads the first half of them
    it.read(2, 9_000)
    assert (it.core.bytes, it.core.wasted_bytes) == (0, 4 * 500)


def test_rows_in_memory_are_no_load() -> None:
    it = Clients()
    it.read(1)
    it.read(1, waited=False)
    known = it.core.read_bytes
    group = group_at(9_000, stored=0)
    it.core.served(2, 0, 10, 10 * MIB, 0, waited=False)
    it.core.served(2, 10, 20, 10 * MIB, 0, waited=False)
    assert it.core.take(2, group)
    assert not it.core.is_loading(group.key)
    assert it.core.read_bytes == known


@pytest.mark.parametrize("clients", [4, 16, 40])
def test_clients_share_the_memory_evenly(clients: int) -> None:
    """tiering/read_ahead U3: also with a client that had all of it before the others came."""
    it = Clients(16 * MIB)
    for _ in range(30):
        it.read(0)
        it.land()
    for _ in range(40):
        for client in range(clients):
            it.read(client)
            it.land()
    held = [it.core._readers[client].unread_bytes // MIB for client in range(clients)]
    assert sum(held) <= 16
    assert max(held) <= max(1, 16 // clients)
    assert sum(held) >= min(clients, 16) * max(1, 16 // clients) - 1


@given(
    st.integers(0, 12),
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.one_of(st.none(), st.none(), st.none(), st.integers(0, 40)),
            st.booleans(),
            st.booleans(),
            st.integers(0, 6_000),
        ),
        max_size=80,
    ),
    st.booleans(),
)
def test_memory_and_waste_are_bounded(
    budget: int, reads: list[tuple[int, int | None, bool, bool, int]], apart: bool
) -> None:
    it = Clients(budget * MIB, apart=apart)
    straight: dict[int, int] = {}
    taken = 0
    for client, seek, waited, land, pause_ms in reads:
        it.now_ms += pause_ms
        on = seek is None or seek * ROWS == it.at.get(client)
        straight[client] = straight.get(client, 0) * on + MIB
        taken += sum(
            each.file_bytes for each in it.read(client, seek and seek * ROWS, waited=waited)
        )
        if land:
            it.land()
        core = it.core
        assert core.bytes <= core.bytes_max  # tiering/read_ahead U1
        assert core.bytes == sum(each.group.memory_bytes for each in core._held.values())
        loading = [each for each in core._held.values() if each.loading]
        assert core.loading_bytes == sum(each.group.memory_bytes for each in loading)
        assert len(loading) == len(set(it.loading))
        for number, known in core._readers.items():
            assert known.unread_bytes == sum(e.memory_bytes for e in known.unread.values())
            assert known.unread_bytes <= max(MIB, straight[number])  # tiering/read_ahead U2
            assert all(each.max_offset >= known.next_offset for each in known.unread.values())
            assert all(key in core for key in known.unread)
        assert core._straight == sum(e.window_bytes > 0 for e in core._readers.values())
        assert core.read_bytes == taken
        assert core.wasted_bytes <= taken
    it.land()
    it.now_ms += read_ahead.IDLE_MS
    it.read(99)
    assert core_is_empty(it.core)


def core_is_empty(core: ReadAhead) -> bool:
    return not core.bytes and not core.loading_bytes and not core._held and len(core._readers) == 1
