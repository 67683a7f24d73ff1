"""The network under a tested cluster: a port of its own for every link."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster import links_between, port_of
from proxy import Link

BROKERS = {1: "127.0.0.1:15001", 2: "127.0.0.1:15002", 3: "127.0.0.1:15003"}


def test_every_link_has_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that a node will listen on is free until it does: a probe alone finds it again."""
    taken = {port_of(where) for where in BROKERS.values()} | {15_004}
    drawn = iter([15_001, 15_004, 16_001, 15_002, 16_001, 15_003, *range(16_002, 16_050)])
    monkeypatch.setattr(random, "randrange", lambda *_: next(drawn))
    links = links_between(BROKERS, taken)
    ports = {link.port for link in links}
    assert {(link.source, link.target) for link in links} == {
        (source, target) for source in BROKERS for target in BROKERS if source != target
    }
    assert len(ports) == len(links) == 6
    assert not ports & taken
    assert all(link.target_port == port_of(BROKERS[link.target]) for link in links)
    assert [Link.parse(str(link)) for link in links] == links
