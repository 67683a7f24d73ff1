"""The cluster's metadata in the tier on real processes (rule T13)."""

from __future__ import annotations

from pathlib import Path

import pytest
from metadata_copy import copied
from real_cluster import until

from pk import AdminClient
from pk.cli.embedded import EmbeddedServer
from pk.server.metadata.image import MetadataImage
from pk.tiering import cluster_directory

pytestmark = pytest.mark.integration

SETTINGS = {
    "tier_metadata_interval_ms": 300,
    "tier_offsets_interval_ms": 300,
    "cluster_id": "c",
}


def copied_topic(tier: Path, name: str) -> MetadataImage | None:
    """The metadata in the store once they have the topic."""
    image = copied(tier, "c")
    return image if name in image.topic_ids else None


def files(tier: Path) -> dict[str, bytes]:
    below = tier / cluster_directory.directory_of("c")
    return {str(path): path.read_bytes() for path in below.rglob("*") if path.is_file()}


def test_metadata_reach_the_tier_and_another_cluster_of_the_same_id_leaves_them(
    tmp_path: Path,
) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    url = tier.as_uri()
    with EmbeddedServer(tmp_path / "pk", tier_url=url, settings=SETTINGS) as server:
        with AdminClient(server.address) as admin:
            admin.create_topic("t", partitions=3, configs={"retention_ms": "70000"})
            topic_id = admin.describe_topics(["t"])[0].topic_id
        image = until(lambda: copied_topic(tier, "t"), "the topic is in the tier")
        assert image.topic_ids["t"] == topic_id
        assert list(image.topics[topic_id].partitions) == [0, 1, 2]
        assert image.topic_config("t")["retention_ms"] == 70_000
    before = files(tier)

    with EmbeddedServer(tmp_path / "other", tier_url=url, settings=SETTINGS) as server:
        with AdminClient(server.address) as admin:
            admin.create_topic("u")
        log = server.directory / "server.log"
        until(lambda: "TierOfAnotherCluster" in log.read_text(), "the second cluster says so")
    assert files(tier) == before
