"""The monitoring examples name metrics that a real node has, and metrics say what happened."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from real_cluster import until

from pk import AdminClient, Consumer, Producer, TopicPartition
from pk.cli.embedded import EmbeddedServer, ReservedPorts

pytestmark = [pytest.mark.integration, pytest.mark.executed]

EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"
#: What Prometheus adds to a target.
OWN = {"up"}


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The metrics of a node with a tier, after records were stored and read."""
    home = tmp_path_factory.mktemp("monitored")
    ports = ReservedPorts()
    port = ports.draw()
    settings = {
        "metrics": f"127.0.0.1:{port}",
        "tier_url": (home / "tier").as_uri(),
        "metrics_partition_limit": 3,
    }
    with EmbeddedServer(home / "node", settings=settings) as server:
        with AdminClient(server.address) as admin, Producer(server.address) as producer:
            admin.create_topic("flights", partitions=2)
            admin.create_topic("others", partitions=5)
            for number in range(100):
                producer.send("flights", b"%d" % number, partition=0)
            producer.flush()
        with Consumer(server.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([TopicPartition("flights", 0)])
            read = 0
            while read < 100:
                read += len(consumer.poll(10))
        yield until(lambda: with_the_tier(port), "the tier process has metrics, too")


def with_the_tier(port: int) -> str:
    """Return a scrape of the whole node; '' before its tier process answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        found: str = reply.read().decode()
    return found if "pk_tier_damaged_files" in found else ""


def names(text: str) -> set[str]:
    """The metrics of a scrape, with the suffixes of histograms."""
    found: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        more = ("_bucket", "_sum", "_count") if kind == "histogram" else ()
        found |= {name, *(name + suffix for suffix in more)}
    return found


def value(text: str, name: str, **labels: str) -> float:
    """The only sample with these labels."""
    wanted = {f'{key}="{given}"' for key, given in labels.items()}
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    (line,) = [line for line in lines if wanted <= set(re.findall(r'\w+="[^"]*"', line))]
    return float(line.rsplit(" ", 1)[1])


def test_latency_is_counted_by_stage(scraped: str) -> None:
    """Every answered batch and every frame is in one bucket of each of its stages."""
    answered = value(scraped, "pk_produce_time_ms_count", stage="total")
    assert answered >= 1
    for stage in ("queue", "local", "remote"):
        assert value(scraped, "pk_produce_time_ms_count", stage=stage) == answered
    parts = sum(
        value(scraped, "pk_produce_time_ms_sum", stage=stage)
        for stage in ("queue", "local", "remote")
    )
    assert parts == pytest.approx(value(scraped, "pk_produce_time_ms_sum", stage="total"))
    assert parts > 0
    sent = value(scraped, "pk_fetch_time_ms_count", stage="send")
    assert sent == value(scraped, "pk_fetch_time_ms_count", stage="read") >= 1
    assert value(scraped, "pk_fetch_time_ms_count", stage="cold") == 0
    assert value(scraped, "pk_fetch_time_ms_bucket", stage="send", le="+Inf") == sent


def test_partitions_have_metrics(scraped: str) -> None:
    flights = {"topic": "flights", "partition": "0"}
    assert value(scraped, "pk_partition_log_end_offset", **flights) == 100
    assert value(scraped, "pk_partition_high_watermark", **flights) == 100
    assert value(scraped, "pk_partition_last_stable_offset", **flights) == 100
    assert value(scraped, "pk_partition_log_start_offset", **flights) == 0
    assert value(scraped, "pk_partition_in_sync_replicas", **flights) == 1
    stored = value(scraped, "pk_partition_bytes_in_total", **flights)
    assert stored == value(scraped, "pk_partition_local_bytes", **flights) > 100
    assert value(scraped, "pk_partition_bytes_out_total", **flights) == stored
    assert value(scraped, "pk_partition_records_in_total", **flights) == 100
    assert value(scraped, "pk_partition_records_out_total", **flights) == 100
    other = {"topic": "flights", "partition": "1"}
    assert value(scraped, "pk_partition_records_in_total", **other) == 0
    assert value(scraped, "pk_partition_bytes_in_total", **other) == 0


def test_partitions_above_the_limit_are_counted(scraped: str) -> None:
    shown = re.findall(r'^pk_partition_replicas\{.*?topic="(\w+)"', scraped, re.MULTILINE)
    assert len(shown) == 3
    assert value(scraped, "pk_partitions_without_metrics") == 2 + 5 - 3


def test_no_series_says_when_a_counter_was_created(scraped: str) -> None:
    assert "_created" not in scraped


def expressions() -> Iterator[tuple[str, str]]:
    """The expressions of the examples, with their places."""
    for group in yaml.safe_load((EXAMPLES / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["action"], rule["alert"]
            assert rule["labels"]["severity"] in ("critical", "warning")
            yield rule["alert"], rule["expr"]
    dashboard = json.loads((EXAMPLES / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if isinstance(variable["query"], dict):
            yield variable["name"], variable["query"]["query"]


def test_the_examples_name_metrics_that_exist(scraped: str) -> None:
    known = names(scraped) | OWN
    listed = list(expressions())
    assert len(listed) > 30
    for place, expression in listed:
        used = set(re.findall(r"\b(?:pk_\w+|up)\b", expression))
        assert used, place
        assert used <= known, (place, used - known)


def test_the_scrape_names_the_rules() -> None:
    found = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())
    assert found["rule_files"] == ["alerts.yml"]
    assert [each["job_name"] for each in found["scrape_configs"]] == ["pk"]


def refused_by_promtool(folder: Path, found: list[tuple[str, str]]) -> str:
    """What Prometheus' own parser says against expressions; Grafana's variables get values."""
    values = {"$__rate_interval": "1m", "$__range": "1h"}
    rules = []
    for number, (place, expression) in enumerate(found):
        for name, given in values.items():
            expression = expression.replace(name, given)
        labels = {"place": place}
        rules.append({"record": f"example_{number}", "expr": expression, "labels": labels})
    path = folder / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "examples", "rules": rules}]}))
    return promtool("check", "rules", "--lint=none", str(path))


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr if done.returncode else ""


@pytest.mark.skipif(
    shutil.which("promtool") is None and os.environ.get("PK_PROMTOOL") != "required",
    reason="no promtool on this machine (it is in Debian's package prometheus; CI installs it and"
    " sets PK_PROMTOOL=required); the files were parsed as YAML and JSON alone",
)
def test_prometheus_loads_the_examples(tmp_path: Path) -> None:
    assert promtool("check", "config", str(EXAMPLES / "prometheus.yml")) == ""
    assert promtool("check", "rules", str(EXAMPLES / "alerts.yml")) == ""
    known = [each for each in expressions() if not each[1].startswith("label_values")]
    assert len(known) > 30
    assert refused_by_promtool(tmp_path, known) == ""
    assert "parse error" in refused_by_promtool(tmp_path, [("broken", "rate(pk_up[5m)")])


def test_the_page_of_metrics_has_what_a_node_exports(scraped: str) -> None:
    """docs/site_reference.py finds them in the source text."""
    path = Path(__file__).parents[2] / "docs" / "site_reference.py"
    spec = importlib.util.spec_from_file_location("site_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = {each.name: each.kind for each in module.metrics()}
    exported = re.findall(r"^# TYPE (pk_\S+) (\S+)$", scraped, re.MULTILINE)
    assert {name: kind for name, kind in exported if page.get(name) != kind} == {}
