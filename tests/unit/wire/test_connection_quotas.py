"""Which connections a listener keeps (wire/connection_quotas N9 to N11, rule L17)."""

from __future__ import annotations

import random

import pytest

from pk.wire.connection_quotas import ConnectionQuotas, proven_by_address


def test_the_newcomer_that_came_first_makes_room() -> None:
    # wire/connection_quotas N11
    quotas: ConnectionQuotas[int] = ConnectionQuotas(4)
    assert not any(quotas.arrive(number, "a") for number in range(4))
    assert quotas.admit(1, known=False) == ""
    assert quotas.arrive(4, "b") == [0]
    assert quotas.arrive(5, "b") == [2]
    assert len(quotas) == 4


def test_a_newcomer_is_turned_away_only_if_all_were_admitted() -> None:
    # wire/connection_quotas N11
    quotas: ConnectionQuotas[int] = ConnectionQuotas(2)
    for number in range(2):
        quotas.arrive(number, str(number))
        assert quotas.admit(number, known=number == 0) == ""
    assert quotas.arrive(2, "2") == [2]
    quotas.leave(1)
    assert quotas.arrive(3, "2") == []


def test_clients_leave_rooms_to_known_peers_and_addresses_to_each_other() -> None:
    # wire/connection_quotas N10
    quotas: ConnectionQuotas[int] = ConnectionQuotas(16)
    for number in range(16):
        quotas.arrive(number, "a" if number < 9 else "b")
    told = [quotas.admit(number, known=False) for number in range(16)]
    assert told[:8] == [""] * 8
    assert "8 connections of a" in told[8]
    assert told[9:15] == [""] * 6
    assert "14 connections are open" in told[15]
    assert quotas.admit(15, known=True) == ""
    assert quotas.admit(8, known=True) == ""
    quotas.leave(0)
    quotas.arrive(16, "a")
    assert quotas.admit(16, known=False) == ""


@pytest.mark.parametrize("seed", range(20))
def test_the_counts_hold_whatever_comes(seed: int) -> None:
    """wire/connection_quotas N9, N10, counted independently after each step."""
    rng, quotas = random.Random(seed), ConnectionQuotas[int](connections_max=12)
    inside: dict[int, str] = {}
    clients: dict[int, str] = {}
    for number in range(400):
        address = rng.choice("abc")
        inside[number] = address
        for gone in quotas.arrive(number, address):
            del inside[gone]
            assert gone not in clients
        for other in rng.sample(sorted(inside), min(2, len(inside))):
            known = rng.random() < 0.1
            if quotas.admit(other, known) == "" and not known and other not in quotas._known:
                clients[other] = inside[other]
            if known:
                clients.pop(other, None)
        for other in rng.sample(sorted(inside), rng.randint(0, min(1, len(inside)))):
            quotas.leave(other)
            quotas.leave(other)
            del inside[other]
            clients.pop(other, None)
        assert len(quotas) == len(inside) <= 12
        assert len(clients) <= 12 - quotas.reserved
        for each in "abc":
            assert list(clients.values()).count(each) <= quotas.per_address


def test_what_an_address_proves() -> None:
    """L17: a loopback address proves nothing."""
    voters = ["10.0.0.1:9392", "[fd00::1]:9392"]
    assert proven_by_address("10.0.0.1:50123", voters)
    assert proven_by_address("fd00::1:50123", voters)
    assert proven_by_address("unix:/run/x.sock", [])
    assert not proven_by_address("10.0.0.2:9392", voters)
    assert not proven_by_address("127.0.0.1:9392", ["127.0.0.1:9392"])
    assert not proven_by_address("::1:9392", ["[::1]:9392"])
