"""Who may have a connection (wire/rooms N9 to N11, rule L17)."""

from __future__ import annotations

import random

import pytest

from pk.wire.rooms import Rooms, proven_by_address


def test_the_newcomer_that_came_first_makes_room() -> None:
    """wire/rooms N11"""
    rooms: Rooms[int] = Rooms(4)
    assert not any(rooms.arrive(number, "a") for number in range(4))
    assert rooms.admit(1, known=False) == ""
    assert rooms.arrive(4, "b") == [0]
    assert rooms.arrive(5, "b") == [2]
    assert len(rooms) == 4


def test_a_newcomer_is_turned_away_only_if_all_were_admitted() -> None:
    """wire/rooms N11"""
    rooms: Rooms[int] = Rooms(2)
    for number in range(2):
        rooms.arrive(number, str(number))
        assert rooms.admit(number, known=number == 0) == ""
    assert rooms.arrive(2, "2") == [2]
    rooms.leave(1)
    assert rooms.arrive(3, "2") == []


def test_clients_leave_rooms_to_known_peers_and_addresses_to_each_other() -> None:
    """wire/rooms N10"""
    rooms: Rooms[int] = Rooms(16)
    for number in range(16):
        rooms.arrive(number, "a" if number < 9 else "b")
    told = [rooms.admit(number, known=False) for number in range(16)]
    assert told[:8] == [""] * 8
    assert "8 connections of a" in told[8]
    assert told[9:15] == [""] * 6
    assert "14 connections are open" in told[15]
    assert rooms.admit(15, known=True) == ""
    assert rooms.admit(8, known=True) == ""
    rooms.leave(0)
    rooms.arrive(16, "a")
    assert rooms.admit(16, known=False) == ""


@pytest.mark.parametrize("seed", range(20))
def test_the_counts_hold_whatever_comes(seed: int) -> None:
    """wire/rooms N9, N10: counted anew after each step."""
    rng, rooms = random.Random(seed), Rooms[int](rooms=12)
    inside: dict[int, str] = {}
    clients: dict[int, str] = {}
    for number in range(400):
        address = rng.choice("abc")
        inside[number] = address
        for gone in rooms.arrive(number, address):
            del inside[gone]
            assert gone not in clients
        for other in rng.sample(sorted(inside), min(2, len(inside))):
            known = rng.random() < 0.1
            if rooms.admit(other, known) == "" and not known and other not in rooms._known:
                clients[other] = inside[other]
            if known:
                clients.pop(other, None)
        for other in rng.sample(sorted(inside), rng.randint(0, min(1, len(inside)))):
            rooms.leave(other)
            rooms.leave(other)
            del inside[other]
            clients.pop(other, None)
        assert len(rooms) == len(inside) <= 12
        assert len(clients) <= 12 - rooms.kept
        for each in "abc":
            assert list(clients.values()).count(each) <= rooms.per_address


def test_what_an_address_proves() -> None:
    """L17: nothing, if it is the loopback's."""
    voters = ["10.0.0.1:9392", "[fd00::1]:9392"]
    assert proven_by_address("10.0.0.1:50123", voters)
    assert proven_by_address("fd00::1:50123", voters)
    assert proven_by_address("unix:/run/x.sock", [])
    assert not proven_by_address("10.0.0.2:9392", voters)
    assert not proven_by_address("127.0.0.1:9392", ["127.0.0.1:9392"])
    assert not proven_by_address("::1:9392", ["[::1]:9392"])
