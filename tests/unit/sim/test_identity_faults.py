"""A copy counts as damaged as long as its first segments are missing (sim/identity_faults.py)."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from pk.log import checkpoints, identity
from pk.log.directory import LOCAL_STARTS, LOG_STARTS
from pk.log.identity import PARTITION_FILE, Identity
from pk.log.segment import LOG, file_name
from pk.sim.campaign import Run
from pk.sim.identity_faults import IdentityFaults
from pk.sim.loss_model import PartitionFacts
from pk.sim.machine import DISKS, KillableStorage
from pk.sim.options import BROKER, NodePlan, SimOptions, TopicPlan
from pk.types import PartitionKey, TopicPartition

KEY = PartitionKey("id", 0)
#: Broker 1 stays in the ISR while it is down, until its session ends.
FACTS = PartitionFacts("t", KEY, (1, 2), (1, 2), 2, 0, (1, 2))
PATH = "topics/t-0"
NAMED = f"{PATH}/{PARTITION_FILE}"
NAME = identity.encode(Identity("id", TopicPartition("t", 0)))
FIRST = f"{PATH}/{file_name(0, LOG)}"


@pytest.fixture
def run() -> Iterator[Run]:
    """Return a run in which the disk of broker 1 has lost the first segment of its only log."""
    topic = TopicPlan("t", 1, {"min_insync_replicas": "2"}, 2)
    run = Run(1, SimOptions(topics=(topic,), nodes=(NodePlan(1), NodePlan(2))))
    machine = run.cluster.machines[0]
    storage = machine.storages[DISKS[BROKER]]
    for directory in ("topics", PATH):
        storage.make_dir(directory)
    storage.replace_file(NAMED, NAME)
    for base in (0, 20):
        storage.replace_file(f"{PATH}/{file_name(base, LOG)}", b"batches")
    for title in (LOG_STARTS, LOCAL_STARTS):
        storage.replace_file(title, checkpoints.encode(title, ["id 0 0"]))
    copy = (FACTS, machine, PATH)
    faults = IdentityFaults(run.cluster, run.observer, Random(1), lambda: [copy], lambda _: None)
    faults.lose_front()
    assert not storage.exists(FIRST)
    yield run
    run.world.close()


def is_rotten(run: Run) -> bool:
    """Let the model see the committed metadata, and return what it takes the copy for."""
    run.observer.losses.seen(FACTS, {})
    return run.observer.losses.is_rotten(KEY, 1)


def disk_of(run: Run) -> KillableStorage:
    return run.cluster.machines[0].storages[DISKS[BROKER]]


def test_a_copy_without_its_first_segments_is_damaged_until_they_are_back(run: Run) -> None:
    assert is_rotten(run)
    disk_of(run).replace_file(FIRST, b"batches")
    assert not is_rotten(run)


@pytest.mark.parametrize("damaged", [False, True], ids=["lost", "damaged"])
def test_the_copy_stays_damaged_while_its_identity_is_gone_too(run: Run, damaged: bool) -> None:
    storage = disk_of(run)
    if damaged:
        storage.rot(NAMED, 5, 1)
    else:
        storage.lose(NAMED)
    assert is_rotten(run)
    storage.replace_file(NAMED, NAME)
    assert is_rotten(run)  # the broker has restored its identity; the segments are still missing


def test_a_log_that_was_begun_for_another_topic_is_not_that_copy(run: Run) -> None:
    storage = disk_of(run)
    storage.replace_file(NAMED, identity.encode(Identity("other", TopicPartition("t", 0))))
    assert not is_rotten(run)
