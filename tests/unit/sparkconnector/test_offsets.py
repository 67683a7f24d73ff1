"""Progress: its one spelling, and what lies between two of them (sparkconnector/offsets O1–O3,
L8)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.sparkconnector import offsets
from pk.sparkconnector.offsets import Bounds, Range, TopicProgress
from pk.sparkconnector.options import OffsetRangeLimit
from pk.types import EpochStart

topics = st.dictionaries(
    st.sampled_from(["a", "b", "flights", "z.9"]),
    st.builds(
        TopicProgress,
        st.uuids().map(str),
        st.dictionaries(st.integers(0, 200), st.integers(0, 2**62), max_size=12),
    ),
    max_size=4,
)


def bounds(
    earliest: int = 0, latest: int = 100, partition: int = 0, topic_id: str = "id"
) -> Bounds:
    return Bounds("t", topic_id, partition, earliest, latest)


def progress(*ends: int, topic_id: str = "id") -> offsets.SourceProgress:
    return {"t": TopicProgress(topic_id, dict(enumerate(ends)))}


@given(topics, st.randoms(use_true_random=False))
def test_equal_positions_have_equal_text(value, rng):
    """sparkconnector/offsets O1: whatever order partitions came in, Spark compares equal text;
    2**62 survives."""
    text = json.dumps(offsets.to_json(value))
    shuffled = {}
    for topic in rng.sample(sorted(value), len(value)):
        partitions = list(value[topic].offsets.items())
        rng.shuffle(partitions)
        shuffled[topic] = TopicProgress(value[topic].topic_id, dict(partitions))
    assert json.dumps(offsets.to_json(shuffled)) == text
    assert json.dumps(offsets.to_json(offsets.from_json(json.loads(text)))) == text


def test_partitions_sort_by_number_not_by_text():
    value = {"t": TopicProgress("id", {10: 1, 9: 2, 100: 3})}
    assert list(offsets.to_json(value)["topics"]["t"]["offsets"]) == ["9", "10", "100"]


@pytest.mark.parametrize(
    "stored", [{}, {"v": 1}, {"flights": {"0": 3}}, {"v": 1, "topics": {"t": {}}}]
)
def test_a_checkpoint_of_another_source_is_refused(stored):
    with pytest.raises(errors.InvalidOption, match="checkpoint"):
        offsets.from_json(stored)


def test_a_newer_checkpoint_is_refused_by_name():
    with pytest.raises(errors.NewerFormat, match="format 2"):
        offsets.from_json({"v": 2, "topics": {}})


def test_a_plain_step():
    ranges, losses = offsets.between(
        progress(10, 20), progress(30, 20), [bounds(), bounds(partition=1)]
    )
    assert ranges == [Range("t", "id", 0, 10, 30)]
    assert losses == []


def test_a_new_partition_is_read_from_its_earliest_offset():
    ranges, losses = offsets.between(progress(10), progress(10, 5), [bounds(), bounds(partition=1)])
    assert ranges == [Range("t", "id", 1, 0, 5)]
    assert losses == []
    ranges, losses = offsets.between(progress(10), progress(10, 5), [bounds(), bounds(2, 100, 1)])
    assert ranges == [Range("t", "id", 1, 2, 5)]
    assert [loss.words for loss in losses] == ["the new partition t-1 begins at 2, not at 0"]


def test_the_first_batch_of_a_topic_has_no_new_partitions():
    """A topic that the pattern matches only now begins at its earliest offset; nothing is lost."""
    ranges, losses = offsets.between({}, progress(100), [bounds(earliest=40)])
    assert ranges == [Range("t", "id", 0, 40, 100)]
    assert losses == []


def test_aged_out_offsets_are_a_loss_and_the_rest_is_read():
    ranges, losses = offsets.between(progress(10), progress(90), [bounds(earliest=50)])
    assert ranges == [Range("t", "id", 0, 50, 90)]
    assert [loss.words for loss in losses] == ["offsets [10, 50) of t-0 were deleted or aged out"]
    ranges, losses = offsets.between(progress(10), progress(30), [bounds(earliest=50)])
    assert ranges == []
    assert "[10, 30)" in losses[0].words


def test_a_log_that_became_shorter_is_a_loss():
    ranges, losses = offsets.between(progress(80), progress(40), [bounds(latest=40)])
    assert ranges == []
    assert "ended at 80 and now ends at 40" in losses[0].words
    ranges, losses = offsets.between(progress(10), progress(80), [bounds(latest=40)])
    assert ranges == [Range("t", "id", 0, 10, 40)]
    assert len(losses) == 1


def test_a_vanished_partition_is_a_loss():
    _, losses = offsets.between(progress(10, 10), progress(10), [bounds()])
    assert [loss.words for loss in losses] == ["t-1 is no more"]
    _, losses = offsets.between(progress(10), {}, [])
    assert [loss.words for loss in losses] == ["t-0 is no more"]


def test_a_recreated_topic_is_named_so_and_begins_anew():
    # rule L8
    ranges, losses = offsets.between(
        progress(10, topic_id="old"),
        progress(5, topic_id="new"),
        [bounds(latest=5, topic_id="new")],
    )
    assert ranges == [Range("t", "new", 0, 0, 5)]
    error = offsets.error_of(losses)
    assert isinstance(error, errors.TopicRecreated)
    assert "topic re-created" in error.message
    assert "failOnDataLoss" in error.message


def test_a_replay_of_a_topic_recreated_meanwhile_reads_nothing_of_the_new_one():
    ranges, losses = offsets.between(progress(10), progress(50), [bounds(topic_id="new")])
    assert ranges == []
    assert losses[0].recreated


def test_other_losses_raise_data_loss():
    assert isinstance(offsets.error_of([offsets.Loss(False, "gone")]), errors.DataLoss)


PAIR = [bounds(10, 100), bounds(0, 50, 1)]


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (OffsetRangeLimit("earliest"), {0: 10, 1: 0}),
        (OffsetRangeLimit("latest"), {0: 100, 1: 50}),
        (OffsetRangeLimit("offsets", offsets={"t": {0: -2, 1: -1}}), {0: 10, 1: 50}),
        (OffsetRangeLimit("offsets", offsets={"t": {0: 42, 1: 7}}), {0: 42, 1: 7}),
    ],
)
def test_positions(position, expected):
    found, losses = offsets.at_position(position, PAIR, {}, "startingOffsets")
    assert found == {"t": TopicProgress("id", expected)}
    assert losses == []


def test_times():
    position = OffsetRangeLimit("time", time_ms=1000)
    assert offsets.times_of(position, PAIR) == {("t", 0): 1000, ("t", 1): 1000}
    found, _ = offsets.at_position(
        position, PAIR, {("t", 0): 12, ("t", 1): None}, "endingTimestamp"
    )
    assert found["t"].offsets == {0: 12, 1: 50}
    with pytest.raises(errors.InvalidOption, match="t-1 has no record at or after that time"):
        offsets.at_position(
            position, PAIR, {("t", 0): 12, ("t", 1): None}, "startingTimestamp", "error"
        )


def test_explicit_offsets_outside_the_log_are_losses():
    found, losses = offsets.at_position(
        OffsetRangeLimit("offsets", offsets={"t": {0: 3, 1: 99}}), PAIR, {}, "startingOffsets"
    )
    assert found["t"].offsets == {0: 10, 1: 50}
    assert len(losses) == 2


@pytest.mark.parametrize(
    ("given", "word"),
    [({"t": {0: 1}}, "lacking: t-1"), ({"t": {0: 1, 1: 1, 2: 1}}, "not read: t-2")],
)
def test_json_offsets_name_exactly_the_partitions_read(given, word):
    with pytest.raises(errors.InvalidOption, match=word):
        offsets.at_position(OffsetRangeLimit("offsets", offsets=given), PAIR, {}, "startingOffsets")


# -- leader epochs (sparkconnector/offsets O4) ----------------------------------------------------


def epoch_bounds(latest: int, *epochs: tuple[int, int], earliest: int = 0) -> Bounds:
    return Bounds("t", "id", 0, earliest, latest, tuple(EpochStart(*each) for each in epochs))


def at(offset: int, epoch: int) -> offsets.SourceProgress:
    return {"t": TopicProgress("id", {0: offset}, {0: epoch})}


def test_the_epoch_stored_is_that_of_the_record_before_the_offset():
    one = epoch_bounds(100, (3, 0), (5, 60))
    for offset, epoch in ((1, 3), (60, 3), (61, 5), (100, 5)):
        found = offsets.with_epochs(progress(offset), [one])
        assert found == at(offset, epoch)
        assert offsets.from_json(json.loads(json.dumps(offsets.to_json(found)))) == found
    assert offsets.with_epochs(progress(0), [one])["t"].epochs == {}
    assert offsets.with_epochs(progress(9, topic_id="other"), [one])["t"].epochs == {}
    assert offsets.with_epochs(progress(9), [epoch_bounds(100, (5, 60))])["t"].epochs == {}


def test_a_new_leader_epoch_is_no_progress():
    assert offsets.same_offsets(at(60, 3), progress(60))
    assert not offsets.same_offsets(at(60, 3), at(61, 3))


def test_what_an_unclean_election_cut_is_a_loss_and_what_replaced_it_is_read():
    """The log was cut at 80 and is longer than before: only the epoch shows it."""
    one = epoch_bounds(150, (3, 0), (6, 80))
    ranges, losses = offsets.between(at(100, 3), offsets.latest([one]), [one])
    assert ranges == [Range("t", "id", 0, 80, 150)]
    assert "[80, 100) of t-0 were cut by an unclean election" in losses[0].words
    assert len(losses) == 1


def test_a_log_that_was_not_cut_is_read_on():
    for epochs in ([(3, 0), (6, 100)], [(3, 0), (6, 120)], [(3, 0)], [], [(6, 120)]):
        one = epoch_bounds(150, *epochs)
        ranges, losses = offsets.between(at(100, 3), offsets.latest([one]), [one])
        assert ranges == [Range("t", "id", 0, 100, 150)]
        assert losses == []


def test_a_checkpoint_without_epochs_is_read():
    one = epoch_bounds(150, (3, 0), (6, 80))
    ranges, losses = offsets.between(progress(100), offsets.latest([one]), [one])
    assert (ranges, losses) == ([Range("t", "id", 0, 100, 150)], [])


def test_an_epoch_that_the_leader_never_had_is_a_loss():
    one = epoch_bounds(150, (2, 0))
    ranges, losses = offsets.between(at(100, 3), offsets.latest([one]), [one])
    assert ranges == [Range("t", "id", 0, 99, 150)]
    assert "was of leader epoch 3, and is of epoch 2 now" in losses[0].words


def test_batches_stay_adjacent_if_the_log_is_cut_after_the_batch_was_planned():
    """failOnDataLoss=false: every record that is there is read once."""
    cut = epoch_bounds(150, (3, 0), (6, 80))
    first, _ = offsets.between(at(50, 3), at(100, 3), [cut])
    then, _ = offsets.between(at(100, 3), offsets.latest([cut]), [cut])
    assert [(each.start, each.end) for each in first + then] == [(50, 80), (80, 150)]
    nothing, _ = offsets.between(at(100, 3), at(100, 3), [cut])
    assert nothing == []
    nothing, _ = offsets.between(at(90, 3), at(100, 3), [cut])
    assert nothing == []


@pytest.mark.parametrize(
    "stored",
    [
        {"v": 1, "topics": {}, "x": 1},
        {"v": 1, "topics": {"t": {"id": "a", "offsets": {}, "groups": {}}}},
    ],
)
def test_a_field_of_a_newer_build_is_refused_by_name(stored):
    with pytest.raises(errors.NewerFormat, match="newer pk"):
        offsets.from_json(stored)
