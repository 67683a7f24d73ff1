"""D1, D2: what a broker reacts to when it loads a snapshot is what changed, both ways."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pk.server.controller.image import MetadataImage
from pk.server.quorum.difference import difference
from tests.unit.quorum.metadata_records import Historian, history


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


def test_what_is_equal_has_no_row() -> None:
    """D2: else every partition would be settled, and every listener told, for nothing."""
    stories = (history(seed, 300) for seed in range(20))
    story = next(each for each in stories if each.image.topics and each.image.brokers)
    end = len(story.records)
    once = {"cluster", "feature_level", "leader_change", "voters", "producer_ids", "no_op"}
    assert set(check(story, end, end)) <= once
