"""metadata/delta D1, D2, Q2: a broker that loads a snapshot reacts to what changed, in both
directions.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pk.server.broker.metadata_publisher import _Changes
from pk.server.metadata.delta import difference
from pk.server.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE, MetadataImage
from tests.unit.server.metadata.metadata_records import BROKERS, Historian, history


def of(story: Historian, upto: int) -> MetadataImage:
    image = MetadataImage()
    for offset, record in enumerate(story.records[:upto]):
        image.apply(offset, record)
    return image


def check(story: Historian, start: int, end: int) -> list[str]:
    earlier, later = of(story, start), of(story, end)
    made = copy.deepcopy(earlier)
    kinds = []
    for offset, record in difference(earlier, later):
        made.apply(offset, record)
        kinds.append(record.WhichOneof("record") or "")
    assert made == later
    return kinds


@pytest.mark.parametrize("seed", range(40))
def test_what_changed_makes_the_later_image_of_the_earlier(seed: int) -> None:
    rng = random.Random(seed)
    story = history(seed, rng.choice([10, 60, 500]))
    for _ in range(4):
        start, end = sorted(rng.sample(range(3, len(story.records) + 1), 2))
        check(story, start, end)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_changed_in_any_history(data: Any) -> None:
    story = Historian(lambda n: data.draw(st.integers(0, n - 1))).begin()
    story.go_on(data.draw(st.integers(0, 20)))
    start = data.draw(st.integers(0, len(story.records)))
    check(story, start, data.draw(st.integers(max(start, 3), len(story.records))))


def compare(story: Historian, start: int, end: int, me: int) -> None:
    """Compare what the broker reacts to with the records themselves, and with the difference."""
    earlier, later = of(story, start), of(story, end)
    live, told = _Changes(), _Changes()
    for record in story.records[start:end]:
        live.note(record, me)
    for _offset, record in difference(earlier, later):
        told.note(record, me)

    def configured(image: MetadataImage, kind: str) -> Any:
        return {name: values for (each, name), values in image.configs.items() if each == kind}

    there = {key for key in live.partitions if later.partition(key) is not None}
    assert there == set(told.partitions)
    assert {each for each in live.removed if each in earlier.topics} == set(told.removed)
    assert all(told.removed[each].name == live.removed[each].name for each in told.removed)
    new = {name for name, known in later.topic_ids.items() if earlier.topic_ids.get(name) != known}
    assert new == set(told.topics)
    before, after = configured(earlier, TOPIC_RESOURCE), configured(later, TOPIC_RESOURCE)
    for name in later.topic_ids.keys() - new:
        assert (before.get(name) != after.get(name)) == (name in told.configured)
    brokers_too = configured(earlier, BROKER_RESOURCE) != configured(later, BROKER_RESOURCE)
    assert told.all_configured == brokers_too
    assert told.brokers == (earlier.brokers != later.brokers)
    assert told.me == (earlier.brokers.get(me) != later.brokers.get(me))


@pytest.mark.parametrize("seed", range(40))
def test_a_broker_reacts_to_it_as_to_the_records_themselves(seed: int) -> None:
    """Q2: this includes removals, and excludes changes that were undone in between."""
    rng = random.Random(seed)
    story = history(seed, rng.choice([10, 60, 500]))
    for _ in range(4):
        start, end = sorted(rng.sample(range(3, len(story.records) + 1), 2))
        compare(story, start, end, rng.choice(BROKERS))


def test_what_is_equal_has_no_row() -> None:
    """metadata/delta D2: otherwise every partition would be settled, and every listener called,
    without a reason.
    """
    stories = (history(seed, 300) for seed in range(20))
    story = next(each for each in stories if each.image.topics and each.image.brokers)
    end = len(story.records)
    once = {"cluster", "feature_level", "leader_change", "voters", "producer_ids", "no_op"}
    assert set(check(story, end, end)) <= once
