"""The options of Spark's Kafka connector under their names (rule S2)."""

from __future__ import annotations

import pytest

from pk import errors
from pk.sparkconnector import options, sink_options

BASE = {"pk.bootstrap.servers": "h:1", "subscribe": "flights"}


def read(streaming: bool = False, **given: str) -> options.Source:
    return options.source({**BASE, **_dotted(given)}, streaming=streaming)


def _dotted(given: dict[str, str]) -> dict[str, str]:
    return {name.replace("__", "."): value for name, value in given.items()}


def test_keys_are_compared_in_lower_case():
    found = options.source(
        {"kafka.bootstrap.servers": "a:1, b:2", "subscribepattern": "fl.*",
         "startingoffsets": "EARLIEST",
         "maxoffsetspertrigger": "5", "failondataloss": "false", "includeheaders": "TRUE"},
        streaming=True,
    )  # fmt: skip
    assert found.bootstrap == "a:1,b:2"
    assert found.pattern == "fl.*"
    assert found.starting.kind == "earliest"
    assert found.max_offsets == 5
    assert not found.fail_on_data_loss
    assert found.include_headers
    assert found.read_committed


def test_defaults_differ_between_batch_and_stream():
    assert read().starting.kind == "earliest"
    assert read().ending.kind == "latest"
    assert read(streaming=True).starting.kind == "latest"


@pytest.mark.parametrize(
    ("given", "topics", "pattern", "assigned"),
    [
        ({"subscribe": " b, a,,b"}, ("a", "b"), None, None),
        ({"subscribePattern": "x|y"}, (), "x|y", None),
        ({"assign": '{"t":[2,0],"s":[1]}'}, (), None, {"s": (1,), "t": (0, 2)}),
    ],
)
def test_subscriptions(given, topics, pattern, assigned):
    found = options.source({"pk.bootstrap.servers": "h:1", **given}, streaming=False)
    assert (found.topics, found.pattern, found.assigned) == (topics, pattern, assigned)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one of subscribe"),
        ({"subscribe": "t", "assign": '{"t":[0]}'}, "found subscribe and assign"),
        ({"subscribe": " ,"}, "names no topic"),
        ({"subscribePattern": "("}, "no regular expression"),
        ({"assign": "t"}, "assign takes"),
        ({"assign": '{"t":[-1]}'}, "assign takes JSON"),
        ({"assign": '{"t":["x"]}'}, "assign takes JSON"),
        ({"subscribe": "t", "startingOffsets": "soon"}, "startingOffsets takes a JSON object"),
        ({"subscribe": "t", "startingOffsets": '{"t":{"0":-3}}'}, "t-0 is -3"),
        ({"subscribe": "t", "startingOffsets": '{"t":{"a":3}}'}, "t-a is 3"),
        ({"subscribe": "t", "startingOffsets": "latest"}, "would read nothing"),
        ({"subscribe": "t", "startingOffsets": '{"t":{"0":-1}}'}, "t-0 is -1"),
        ({"subscribe": "t", "endingOffsets": "earliest"}, "would read nothing"),
        ({"subscribe": "t", "endingOffsets": '{"t":{"0":-2}}'}, "t-0 is -2"),
        (
            {"subscribe": "t", "startingOffsets": '{"t":{"0":9}}',
             "endingOffsets": '{"t":{"0":3}}'},
            "startingOffsets 9 is behind endingOffsets 3",
        ),
        ({"subscribe": "t", "startingTimestamp": "-5"}, "milliseconds since 1970"),
        ({"subscribe": "t", "minPartitions": "0"}, "a whole number greater than 0"),
        ({"subscribe": "t", "maxRecordsPerPartition": "many"}, "maxRecordsPerPartition"),
        ({"subscribe": "t", "failOnDataLoss": "maybe"}, "failOnDataLoss is true or false"),
        ({"subscribe": "t", "packPartitions": "2"}, "packPartitions is true or false"),
        ({"subscribe": "t", "columnar": "yes"}, "columnar is true or false"),
        ({"subscribe": "t", "openCostBytes": "0"}, "openCostBytes is a whole number greater than"),
        ({"subscribe": "t", "pk.isolation.level": "chaos"}, "isolation.level is one of"),
        ({"subscribe": "t", "startingOffsetsByTimestampStrategy": "guess"}, "one of error, latest"),
        ({"subscribe": "t", "columns": "key,valeu"}, "did you mean value"),
        ({"subscribe": "t", "columns": "key,key"}, "twice"),
        ({"subscribe": "t", "columns": "headers", "includeHeaders": "false"}, "is false"),
        ({"subscribe": "t", "pk.fetch.max.bytes": "-1"}, "fetch.max.bytes"),
        ({"subscribe": "t", "maxoffsetpertrigger": "5"}, "did you mean maxOffsetsPerTrigger"),
        ({"subscribe": "t", "bootstrap.servers": "x"}, "did you mean pk.bootstrap.servers"),
        ({"subscribe": "t", "kafka.fetch.max.byts": "1"}, "did you mean pk.fetch.max.bytes"),
        ({"subscribe": "t", "kafka.bootstrap.servers": "other:1"}, "same option, with two values"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_with_the_reason(given, words):
    base = {"pk.bootstrap.servers": "h:1"}
    with pytest.raises(errors.InvalidOption) as raised:
        options.source({**base, **given}, streaming=False)
    assert words in raised.value.message


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"endingOffsets": "latest"}, "stream, which does not end"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "3"}, "may not exceed"),
        ({"maxTriggerDelay": "soon", "minOffsetsPerTrigger": "9"}, "duration like 30s"),
    ],
)
def test_bad_streaming_options(given, words):
    with pytest.raises(errors.InvalidOption, match=words):
        options.source({**BASE, **given}, streaming=True)


@pytest.mark.parametrize("name", ["kafka.security.protocol", "kafka.sasl.jaas.config", "pk.ssl.ca"])
def test_security_is_refused_until_it_exists(name):
    for side in (sink_options.sink, lambda given: options.source(given, streaming=True)):
        with pytest.raises(errors.UnsupportedFeature, match="no security yet"):
            side({**BASE, name: "x"})


def test_meaningless_options_are_accepted_with_one_warning_each():
    found = read(kafka__key__deserializer="K", groupIdPrefix="p", topic="t")
    assert len(found.warnings) == 3
    assert found.client == {}
    sunk = sink_options.sink(
        {"kafka.bootstrap.servers": "h:1", "startingOffsets": "latest", "pk.retries": "3"}
    )
    assert len(sunk.warnings) == 2


def test_a_stream_may_show_its_progress_as_a_group():
    assert read(True, groupId="g").group_id == "g"
    assert read(True, kafka__group__id="g").group_id == "g"
    assert read(True).group_id == ""
    batch = read(groupId="g")
    assert batch.group_id == ""
    assert "groupId has no effect on a batch read" in batch.warnings[0]
    assert not read(True, groupId="g").hold_retention
    assert read(True, groupId="g", holdRetention="true").hold_retention
    assert "holdRetention has no effect" in read(holdRetention="true").warnings[0]
    with pytest.raises(errors.InvalidOption, match="holdRetention needs groupId"):
        read(True, holdRetention="true")
    for odd in ("", " ", "g" * 250):
        with pytest.raises(errors.InvalidOption, match="groupId"):
            read(True, groupId=odd)


def test_sparks_own_options_pass_in_silence():
    assert read(checkpointLocation="/x", path="/y", mergeSchema="true").warnings == ()


def test_client_settings_reach_the_client():
    assert read(kafka__fetch__max__bytes="1048576").client == {"fetch_max_bytes": 1048576}
    sunk = sink_options.sink(
        {
            "pk.bootstrap.servers": "h:1",
            "kafka.compression.type": "lz4",
            "kafka.linger.ms": "20",
            "kafka.acks": "all",
        }
    )
    assert sunk.client == {"compression": "lz4", "linger_ms": 20.0}


def test_a_setting_of_the_other_client_is_a_warning():
    assert "no effect" in read(kafka__linger__ms="5").warnings[0]


@pytest.mark.parametrize("given", [{"kafka.acks": "1"}, {"pk.enable.idempotence": "false"}])
def test_a_sink_reports_only_what_was_acknowledged(given):
    with pytest.raises(errors.InvalidOption, match="of a sink"):
        sink_options.sink({"pk.bootstrap.servers": "h:1", **given})


def test_a_sink_is_exactly_once_unless_told_otherwise():
    base = {"pk.bootstrap.servers": "h:1"}
    assert sink_options.sink(base).exactly_once
    assert not sink_options.sink({**base, "kafka.delivery": "At_Least_Once"}).exactly_once
    found = sink_options.sink({**base, "txnAppId": "app", "txnVersion": "7"})
    assert (found.app, found.version, found.accept_mismatch) == ("app", 7, False)
    assert sink_options.sink({**base, "onReplayMismatch": "accept"}).accept_mismatch
    assert not sink_options.sink(base).write_unknown
    assert sink_options.sink({**base, "onLostHistory": "write"}).write_unknown
    with pytest.raises(errors.InvalidOption, match="query id and its batch id"):
        sink_options.for_stream(found)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pk.delivery": "exactly"}, "exactly_once, at_least_once"),
        ({"txnAppId": "app"}, "together"),
        ({"txnVersion": "1"}, "together"),
        ({"txnAppId": " ", "txnVersion": "1"}, "1 to 249 bytes"),
        ({"txnAppId": "x" * 250, "txnVersion": "1"}, "not 250"),
        ({"txnAppId": "app", "txnVersion": "-1"}, "whole number"),
        ({"txnAppId": "app", "txnVersion": str(2**63)}, "whole number"),
        ({"txnAppId": "a", "txnVersion": "1", "pk.delivery": "at_least_once"}, "needs pk.delivery"),
        ({"onReplayMismatch": "drop"}, "fail, accept"),
        ({"onLostHistory": "skip"}, "fail, write"),
        ({"pk.transactional.id": "x"}, "a query has its own"),
        ({"pk.transaction.timeout.ms": "5"}, "participant_transaction_max_ms"),
    ],
)
def test_bad_options_of_a_transaction(given, words):
    with pytest.raises(errors.InvalidOption, match=words):
        sink_options.sink({"pk.bootstrap.servers": "h:1", **given})


def test_a_job_has_a_name_of_bounded_size_for_each_sink():
    assert sink_options.job_name("q", "t") == "q:t"
    names = {sink_options.job_name("q", topic) for topic in ("x" * 249, "y" * 249, "t", None)}
    assert len(names) == 4
    assert all(len(name) <= 249 for name in names)


def test_a_time_wins_over_offsets_as_in_kafkas_connector():
    found = read(
        startingTimestamp="5", startingOffsets="earliest", endingOffsetsByTimestamp='{"t":{"0":7}}'
    )
    assert (found.starting.kind, found.starting.time_ms) == ("time", 5)
    assert (found.ending.kind, found.ending.times) == ("times", {"t": {0: 7}})
    assert "startingTimestamp wins" in found.warnings[0]


def test_the_bootstrap_address_is_required():
    with pytest.raises(errors.InvalidOption, match=r"pk\.bootstrap\.servers must be given"):
        options.source({"subscribe": "t"}, streaming=False)


@pytest.mark.parametrize(
    ("text", "ms"),
    [("15m", 900_000), ("30s", 30_000), ("250", 250), ("2 H", 7_200_000), ("1d", 86_400_000)],
)
def test_durations(text, ms):
    assert options.duration_ms("maxTriggerDelay", text) == ms


def test_columns():
    assert options.column_names(read()) == (
        "key", "value", "topic", "partition", "offset", "timestamp", "timestampType",
    )  # fmt: skip
    assert options.column_names(read(includeHeaders="true"))[-1] == "headers"
    assert (
        options.ddl(options.column_names(read(columns="offset, VALUE")))
        == "offset bigint NOT NULL, value binary"
    )


def test_a_batch_names_a_version_of_the_tables():
    assert read().as_of is None
    assert read(pinned="false").as_of is None
    assert read(versionAsOf=" 7 ").as_of == options.AsOf(version=7)
    assert read(versionasof="0").as_of == options.AsOf(version=0)
    assert read(timestampAsOf="1767182400000").as_of == options.AsOf(time_ms=1767182400000)
    for text in ("2025-12-31T12:00:00Z", "2025-12-31T14:00:00+02:00", "2025-12-31 12:00Z"):
        assert read(timestampAsOf=text).as_of == options.AsOf(time_ms=1767182400000)
    pinned = read(pinned="true", endingOffsets='{"flights":{"0":5,"1":9}}')
    assert pinned.as_of == options.AsOf(pinned=True)
    assert pinned.ending.offsets == {"flights": {0: 5, 1: 9}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"versionAsOf": "-1"}, "number of a version"),
        ({"versionAsOf": "x"}, "not 'x'"),
        ({"versionAsOf": "1" * 19}, "number of a version"),
        ({"timestampAsOf": "2025-12-31"}, "with its zone"),
        ({"timestampAsOf": "yesterday"}, "not 'yesterday'"),
        ({"versionAsOf": "1", "timestampAsOf": "1"}, "give one of them"),
        ({"versionAsOf": "1", "pinned": "true"}, "give one of them"),
        ({"pinned": "true"}, "needs endingOffsets"),
        ({"pinned": "true", "endingOffsets": '{"flights":{"0":-1}}'}, "needs endingOffsets"),
        ({"versionAsOf": "1", "endingTimestamp": "5"}, "give endingOffsets"),
    ],
)
def test_unclear_versions_are_refused(given, words):
    with pytest.raises(errors.InvalidOption, match=words):
        read(**given)


@pytest.mark.parametrize("name", options.BATCH_ONLY)
def test_a_stream_refuses_what_ends_a_batch(name):
    with pytest.raises(errors.InvalidOption, match=f"{name} has no meaning for a stream"):
        read(streaming=True, **{name: "1"})


def test_columnar_is_off_unless_the_option_or_the_environment_says_so(monkeypatch) -> None:
    for variable, option, expected in (
        (None, None, False), (None, "true", True), ("true", None, True), ("TRUE", "false", False),
    ):  # fmt: skip
        if variable is not None:
            monkeypatch.setenv("PK_SPARK_COLUMNAR", variable)
        asked = {**BASE, **({} if option is None else {"columnar": option})}
        assert options.source(asked, streaming=False).columnar is expected
    monkeypatch.setenv("PK_SPARK_COLUMNAR", "1")
    with pytest.raises(errors.InvalidOption, match="PK_SPARK_COLUMNAR is true or false"):
        options.source(BASE, streaming=False)
