"""Several data directories of a real node, one of which fails (rule L2, broker/failures B3)."""

from __future__ import annotations

import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_cluster import run

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer, ReservedPorts
from pk.clock import block_s, monotonic_s

pytestmark = pytest.mark.integration

PATIENCE_S = 60
SEGMENT_BYTES = 100_000
RECORD_BYTES = 20_000


class Node:
    """`pk server start` with two directories; `b` is a mount point of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.ports = ReservedPorts()
        self.metrics = self.ports.address()
        self.server = EmbeddedServer(home, data=("a", "b"), settings={"metrics": self.metrics})

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def log(self) -> str:
        return self.server.log.read_text()

    def start(self) -> None:
        self.server.start(PATIENCE_S)

    def stop(self) -> None:
        self.server.stop(PATIENCE_S)

    def metric(self, name: str) -> float:
        """Return a metric's value; 0 until the broker has set it once."""
        text = urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=10).read().decode()
        found = [each for each in text.splitlines() if each.startswith(f"{name} ")]
        return float(found[0].split()[-1]) if found else 0

    def values(self, topic: str, count: int) -> list[bytes | None]:
        found: list[bytes | None] = []
        place = TopicPartition(topic, 0)
        with Consumer(self.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([place])
            deadline = monotonic_s() + PATIENCE_S
            while len(found) < count:
                assert monotonic_s() < deadline, f"{len(found)} of {count}"
                found += [record.value for record in consumer.poll(0.5)]
        return found


def mount(*arguments: str) -> bool:
    if shutil.which("mount") is None:
        return False
    return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    second = tmp_path / "b"
    second.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=256m", "tmpfs", str(second)):
        pytest.skip("a file system of one's own needs the right to mount (run as root)")
    made = Node(tmp_path)
    try:
        yield made
    finally:
        made.stop()
        while subprocess.run(["umount", "-l", str(second)], capture_output=True).returncode == 0:
            pass


def until(holds: Callable[[], Any]) -> Any:
    deadline = monotonic_s() + PATIENCE_S
    while not (answer := holds()):
        assert monotonic_s() < deadline, "it never came true"
        block_s(0.05)
    return answer


def holds(node: Node, topic: str, count: int) -> None:
    """Check that the topic has exactly the stored records, in order."""
    found = node.values(topic, count)
    assert [value[:4] for value in found if value] == [b"%04d" % n for n in range(count)]


def read_only(place: Path) -> None:
    """Make the directory refuse every new file from now on; open files are not affected."""
    assert mount("--bind", str(place), str(place))
    assert mount("-o", "remount,bind,ro", str(place))


def unmounted(place: Path) -> None:
    """Unmount the disk: processes that have its files open keep them, and its path leads to an
    empty directory.
    """
    subprocess.run(["umount", "-l", str(place)], check=True)


def check_visible(node: Node, topic: str, bad: Path) -> None:
    """Check what an operator sees: the command line, the metrics, the log."""
    told = run(["topics", "describe", topic, "--bootstrap", node.address])
    assert "partition 0: " in told
    assert str(bad) in " ".join(told.split())
    until(lambda: node.metric("pk_offline_directories") == 1)
    assert node.metric('pk_partitions{state="offline"}') == 1
    assert "directory_offline" in node.log


@pytest.mark.parametrize("fails", [read_only, unmounted])
def test_a_directory_that_fails_takes_its_own_partitions_offline(
    node: Node, fails: Callable[[Path], None]
) -> None:
    """Writers, readers and describe requests get a typed error; the failure is counted; the other
    directory continues.
    """
    node.start()
    bad = node.home / "b"
    with AdminClient(node.address) as admin, Producer(node.address, linger_ms=0) as producer:
        for name in ("one", "two"):
            admin.create_topic(name, configs={"segment_bytes": SEGMENT_BYTES, "retention_ms": -1})
        where = {each.topic: each.directory for each in admin.describe_topics()}
        assert set(where.values()) == {str(node.home / "a"), str(bad)}
        lost = next(topic for topic in where if where[topic] == str(bad))
        kept = "two" if lost == "one" else "one"
        stored = {lost: 0, kept: 0}

        def send(topic: str, count: int = 1) -> None:
            for _ in range(count):
                value = b"%04d" % stored[topic] + bytes(RECORD_BYTES)
                producer.send(topic, value).result(PATIENCE_S)
                stored[topic] += 1

        two_segments = 2 * SEGMENT_BYTES // RECORD_BYTES
        send(lost)
        send(kept)
        fails(bad)
        # The next segment is a new file.  A checkpoint may meet the failure before it.
        with pytest.raises((errors.OutcomeUnknown, errors.StorageFailed), match=str(bad)):
            send(lost, two_segments)
        with pytest.raises(errors.StorageFailed, match=str(bad)) as refused:
            send(lost)
        assert refused.value.acts == "operator"
        send(kept, two_segments)
        holds(node, kept, stored[kept])
        # Appends are refused at once.  The next tick takes the directory offline for readers, too.
        until(lambda: node.metric('pk_partitions{state="offline"}') == 1)
        with pytest.raises(errors.StorageFailed, match=str(bad)):
            node.values(lost, 1)
        described = {each.topic: each.error for each in admin.describe_topics()}
        assert isinstance(described[lost], errors.StorageFailed)
        assert described[kept] is None
        check_visible(node, lost, bad)
        admin.create_topic("three", configs={"retention_ms": -1})
        assert producer.send("three", b"x").result(PATIENCE_S).offset == 0
        (three,) = admin.describe_topics(["three"])
        assert three.directory == str(node.home / "a")
        # a broker that is restarted finds the directory failed: its records still exist
        old = node.server.pids()["broker"]
        node.server.kill("broker")
        node.server.wait_restarted("broker", old)
        with pytest.raises(errors.StorageFailed, match=f"{lost}-0 is in no directory that works"):
            node.values(lost, 1)
        with pytest.raises(errors.StorageFailed, match=str(bad)):
            send(lost)
        send(kept)
        holds(node, kept, stored[kept])
    if fails is unmounted:
        assert not list(bad.iterdir()), "what the name leads to now is somebody else's"
        return  # an unmounted tmpfs vanishes with the last process that uses it
    node.stop()
    subprocess.run(["umount", str(bad)], check=True)
    node.start()
    for topic, count in stored.items():
        holds(node, topic, count)
    with Producer(node.address) as producer:
        assert producer.send(lost, b"again").result(PATIENCE_S).offset == stored[lost]
    assert "BUG" not in node.log
