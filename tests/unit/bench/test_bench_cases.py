"""Which party is measured when, and what is reported: two sides that only keep a diary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import cases, measuring, page, plans, report, sides
from bench.runs import Sample
from pk.limits import MIB


class Diary:
    """A side that measures nothing."""

    description = "a diary"

    def __init__(self, name: str, rate: float, diary: list[str]) -> None:
        self.name, self.rate, self.diary = name, rate, diary
        self.address = ""
        self.rounds = 0

    def _write(self, what: str) -> None:
        self.diary.append(f"{self.name} {what}")

    def start(self, folder: Path) -> None:
        self._write("start")

    def stop(self) -> None:
        self._write("stop")

    def pids(self) -> list[int]:
        return []

    def probe(self) -> dict[int, int]:
        return {0: 1}

    def create_topic(
        self, topic: str, partitions: int = 4, configs: Mapping[str, str] | None = None
    ) -> None:
        self._write("create")

    def delete_topic(self, topic: str) -> None:
        self._write("delete")

    def produce(
        self,
        topic: str,
        values: Path,
        records: int,
        compression: str,
        mode: str,
        batch_bytes: int | None = None,
    ) -> Sample:
        self._write(f"produce {mode} {compression}")
        return self._sample(records)

    def consume(
        self,
        topic: str,
        records: int,
        mode: str,
        partitions: int = 4,
        starts: Sequence[int] = (),
    ) -> Sample:
        self._write(f"consume {mode}{' the tail' if starts else ''}")
        return self._sample(records)

    def latency(self, topic: str, records: int) -> Sample:
        self._write("latency")
        return self._sample(records)

    def ends(self, topic: str) -> list[int]:
        return [7]

    def segment_files(self, topic: str) -> list[Path]:
        return []

    def _sample(self, records: int) -> Sample:
        self.rounds += 1
        return Sample(self.rate + self.rounds, records, 2.0, 1.0, 100.0, 200.0)


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    entries: list[str] = []
    monkeypatch.setattr(measuring, "PAUSE_S", 0)
    monkeypatch.setattr(measuring, "TOUCH_BYTES", 2 * MIB)
    monkeypatch.setattr(sides, "freeze", lambda side: entries.append(f"{side.name} frozen"))
    monkeypatch.setattr(sides, "thaw", lambda side: entries.append(f"{side.name} thawed"))
    monkeypatch.setattr(sides, "settle", lambda side: entries.append(f"{side.name} settled"))
    return entries


def _measure(
    name: str, diary: list[str], tmp_path: Path, rounds: int = 3, only: Sequence[str] = ("lz4",)
) -> list[measuring.Result]:
    pk, peer = Diary("pk", 6e6, diary), Diary("kafka", 1e6, diary)
    with measuring.Bench(pk, peer, tmp_path, lambda line: None, size_gb=0.1) as bench:
        return bench.measure(cases.BY_NAME[name], rounds, 1.0, only)


def test_rounds_alternate_and_only_one_side_is_awake(diary: list[str], tmp_path: Path) -> None:
    _measure("consume_columnar", diary, tmp_path, rounds=2)
    awake: set[str] = set()
    for entry in diary:
        name, what = entry.split(maxsplit=1)
        if what in ("start", "thawed"):
            awake.add(name)
        elif what in ("frozen", "stop"):
            awake.discard(name)
        else:
            assert awake == {name}, entry
    assert [e for e in diary if "consume" in e] == [
        "pk consume batches", "kafka consume java", "kafka consume java", "pk consume batches",
    ]  # fmt: skip
    assert diary[-2:] == ["kafka stop", "pk stop"]
    settled = [entry for entry in diary if "settled" in entry]
    assert settled == ["pk settled", "kafka settled"]  # after its start; `thaw` is faked here


def test_a_produce_round_has_a_topic_of_its_own(diary: list[str], tmp_path: Path) -> None:
    (result,) = _measure("produce_columnar", diary, tmp_path)
    created = [entry for entry in diary if "create" in entry or "delete" in entry]
    assert created[0::2] == [entry.replace("delete", "create") for entry in created[1::2]]
    assert len(result.pk["lists"]) == len(result.pk["prebuilt"]) == len(result.peer["java"]) == 3
    assert result.ratio == pytest.approx(6, rel=0.01)


def test_of_latencies_the_smaller_is_better(diary: list[str], tmp_path: Path) -> None:
    (result,) = _measure("latency", diary, tmp_path, only=["idle"])
    assert result.ratio == pytest.approx(1 / 6, rel=0.01)
    assert diary.count("pk latency") == diary.count("kafka latency") == 3


def test_the_better_peer_counts(diary: list[str], tmp_path: Path) -> None:
    (result,) = _measure("produce_record", diary, tmp_path)
    for sample in result.peer["confluent"]:
        sample.value *= 2
    assert result.peer_mode == "confluent"
    assert result.ratio == pytest.approx(3, rel=0.01)


def test_a_joint_round_gives_every_variant(diary: list[str], tmp_path: Path) -> None:
    """deep_log: pk compared with itself, one client each for produce and for the tail."""
    produce, tail = _measure("deep_log", diary, tmp_path, rounds=2, only=())
    assert (produce.variant.name, tail.variant.name) == ("produce", "tail fetch")
    assert not [entry for entry in diary if entry.startswith("kafka")]
    assert diary.count("pk consume batches the tail") == 2 + 4  # two of them untimed
    assert produce.pk["deep"][0].value < tail.pk["deep"][0].value  # the diary's rates grow


def _line(variants: Mapping[str, float]) -> dict[str, object]:
    """Return a line of produce_columnar with these rates of pk by variant; the peer has 1e6."""
    case = cases.BY_NAME["produce_columnar"]
    results = []
    for variant in case.variants:
        if variant.name in variants:
            ours = [
                Sample(variants[variant.name] + n, 12e6, 2.0, 1.0, 100.0, 200.0) for n in (0, 1, 2)
            ]
            theirs = [Sample(1e6 + n, 12e6, 2.0, 1.0, 100.0, 200.0) for n in (0, 1, 2)]
            pk = {"lists": ours, "prebuilt": ours}
            results.append(measuring.Result(case, variant, pk, {"java": theirs}))
    return report.line(results, {"pk": "ours", "kafka": "theirs"})


def test_the_line_the_table_the_page_and_the_plot_tell_the_same() -> None:
    line = _line({"none": 6e6, "lz4": 4e6})
    assert json.loads(json.dumps(line)) == line
    assert (line["name"], line["variant"], line["ratio"]) == ("produce_columnar", "none", 6.0)
    assert line["lz4"]["ratio"] == 4.0
    assert len(line["pk_runs"]) == len(line["peer_runs"]) == 3
    assert line["cpu_s_per_m_records"]["pk"] == {"client": 0.167, "server": 0.083}
    assert line["peak_rss_mb"]["peer"] == {"client": 100.0, "server": 200.0}
    assert [row[:2] for row in report.rows([line])] == [
        ("produce_columnar", "none"), ("produce_columnar", "lz4"),
    ]  # fmt: skip
    assert report.table([line]).row_count == 2
    text = page.page([line])
    assert "| produce_columnar | lz4 | 4,000,001 records/s | 1,000,001 | **4.00** | 5 | 8 |" in text
    assert "- **kafka**: theirs" in text
    drawn = [each.text for each in ElementTree.fromstring(page.plot([line])).iter() if each.text]
    assert "6.00" in drawn
    assert "produce_columnar · lz4" in drawn


def test_a_case_that_is_run_again_replaces_its_own_rows_only(tmp_path: Path) -> None:
    path = tmp_path / "bench.md"
    page.write(path, [_line({"none": 6e6, "lz4": 4e6})])
    other = {**_line({"none": 3e6}), "name": "consume_columnar"}
    page.write(path, [other])
    page.write(path, [_line({"lz4": 9e6})])
    found = {
        row[:2]: row.figures["ratio"]
        for row in report.rows(report.stored(tmp_path / "bench.jsonl"))
    }
    assert found == {
        ("produce_columnar", "none"): 6.0,
        ("produce_columnar", "lz4"): 9.0,
        ("consume_columnar", "none"): 3.0,
    }
    assert "**9.00**" in path.read_text()


def test_a_side_that_never_settles_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Diary("kafka", 1, [])
    monkeypatch.setattr(sides, "SETTLE_TIMEOUT_S", 0.0)
    with pytest.raises(sides.SideFailed, match="kafka did not settle"):
        sides.settle(side)


def test_settling_means_that_epochs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Diary("kafka", 1, [])
    answers = iter([{0: 1}, {0: 2}, {0: 2}, {0: 2}])
    seen: list[dict[int, int]] = []

    def probe() -> dict[int, int]:
        seen.append(next(answers))
        return seen[-1]

    monkeypatch.setattr(side, "probe", probe)
    monkeypatch.setattr(sides, "STEADY_S", 0.0)
    sides.settle(side)
    assert len(seen) == 4


def test_a_figure_of_pk_above_its_bound_is_not_reached() -> None:
    """The bound holds whatever the peer's figure is; lines of an older store have none."""
    figures = {"pk": 6.0, "ratio": 9.0, "at_least": 1.0, "at_most": 5.0, "unit": "s"}
    assert not report.reached(figures)
    assert report.reached({**figures, "pk": 5.0})
    assert not report.reached({**figures, "pk": 5.0, "ratio": 0.9})
    assert report.goal(figures) == "1, pk ≤ 5 s"
    assert report.goal({**figures, "at_least": 0.0}) == "pk ≤ 5 s"
    old = {"pk": 6.0, "ratio": 1.0, "at_least": 0.0, "unit": "s"}
    assert report.reached(old)
    assert report.goal(old) == "–"


def test_every_case_has_a_plan_and_names_of_its_own() -> None:
    for case in cases.CASES:
        assert case.plan in plans.HOMES, case.name
        names = [variant.name for variant in case.variants]
        assert len(set(names)) == len(names), case.name
    assert len(cases.BY_NAME) == len(cases.CASES)
