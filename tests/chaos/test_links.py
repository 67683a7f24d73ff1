"""The network under a tested cluster: every link has a port of its own."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cluster import links_between, port_of
from proxy import Link

BROKERS = {1: "127.0.0.1:15001", 2: "127.0.0.1:15002", 3: "127.0.0.1:15003"}


def test_every_link_has_a_port_of_its_own() -> None:
    links = links_between(BROKERS, itertools.count(16_001).__next__)
    assert {(link.source, link.target) for link in links} == {
        (source, target) for source in BROKERS for target in BROKERS if source != target
    }
    assert len({link.port for link in links}) == len(links) == 6
    assert all(link.target_port == port_of(BROKERS[link.target]) for link in links)
    assert [Link.parse(str(link)) for link in links] == links
