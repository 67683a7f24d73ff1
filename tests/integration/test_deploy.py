"""The examples of deployment start real nodes with the files and the commands that they have.

Only places change: directories, ports, the names of machines, and the object store's credentials.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pk import AdminClient, Producer
from pk.cli.embedded import ReservedPorts, ServerProcess
from pk.clock import block_s, monotonic_s

pytestmark = [pytest.mark.integration, pytest.mark.executed]

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
NODES = ("node1", "node2", "node3")
DATA = "/var/lib/pk"
PK = (sys.executable, "-m", "pk.cli")


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    return found


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


class UnitParser(configparser.ConfigParser):
    """The names of systemd's options keep their case."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def unit() -> configparser.ConfigParser:
    parsed = UnitParser(interpolation=None, strict=True)
    parsed.read_string((DEPLOY / "systemd" / "pk.service").read_text())
    return parsed


def localized(text: str, places: Mapping[str, str]) -> str:
    """Return the text with its places replaced.  Each place must occur in it."""
    for place, local in places.items():
        assert place in text, place
        text = text.replace(place, local)
    return text


def healthy(metrics: str) -> bool:
    """Run the health check of the Dockerfile against another address."""
    command = yaml.safe_load(dict(instructions())["HEALTHCHECK"].partition("CMD ")[2])
    assert command[0] == "python"
    assert "127.0.0.1:9300" in command[-1]
    local = [part.replace("127.0.0.1:9300", metrics) for part in command[1:]]
    done = subprocess.run([sys.executable, *local], capture_output=True, timeout=60, check=False)
    return done.returncode == 0


def wait_healthy(metrics: str) -> None:
    deadline = monotonic_s() + 60
    while not healthy(metrics):
        assert monotonic_s() < deadline, metrics
        block_s(0.2)


@contextmanager
def running(
    command: list[str], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of `pk` that ends with the block: it must drain and exit with 0."""
    given = {**os.environ, **environment}
    with subprocess.Popen(
        [*PK, *command], env=given, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    ) as node:  # fmt: skip
        try:
            yield node
            node.terminate()
            assert node.wait(60) == 0
        finally:
            node.kill()


@pytest.mark.s3
def test_the_nodes_of_the_compose_file_form_a_cluster(tmp_path: Path, s3_server: Any) -> None:
    ports = ReservedPorts()
    services = compose()["services"]
    shared = (DEPLOY / "node.toml").read_text()
    voters = {f"{name}:9392": ports.address() for name in NODES}
    made = services["bucket"]["command"]
    subprocess.run(
        [each.replace("/data", f"{s3_server.directory}/data") for each in made], check=True
    )
    credentials = {"pk-example": "access_key", "pk-example-secret": "secret_key"}
    nodes: list[ServerProcess] = []
    metrics: list[str] = []
    for name in NODES:
        home = tmp_path / name
        metrics.append(ports.address())
        places = {
            DATA: str(home),
            "0.0.0.0:9300": metrics[-1],
            "http://s3:7070": s3_server.endpoint,
        }
        config = tmp_path / f"{name}.toml"
        config.write_text(localized(shared, voters | places))
        node = ServerProcess(config, tmp_path / f"{name}.log")
        given = services[name]["environment"]
        node.environment = {
            key: getattr(s3_server, credentials[value]) if value in credentials else value
            for key, value in given.items()
        } | {"PK_LISTEN": localized(given["PK_LISTEN"], {f"{name}:9292": ports.address()})}
        formatted = [*PK, "server", "format", "--config", str(config), "--initial-controllers"]
        subprocess.run(formatted, env={**os.environ, **node.environment}, check=True, timeout=60)
        nodes.append(node)
    try:
        for node in nodes:
            node.spawn()
        for number, node in enumerate(nodes, start=1):
            ready = node.wait_ready()
            assert ready["address"] == node.environment["PK_LISTEN"], number
        for address in metrics:
            wait_healthy(address)
        stored_and_tiered(nodes[0].ready["address"])
    finally:
        for node in nodes:
            node.ask_to_stop()
        ended = [node.wait(60) for node in nodes]
    assert ended == [0, 0, 0]
    assert not healthy(metrics[0])


def stored_and_tiered(address: str) -> None:
    """Store a record on three replicas, and wait until it is in the topic's table."""
    with AdminClient(address) as admin, Producer(address, acks="all") as producer:
        admin.create_topic("flights", partitions=1, configs={"tier_max_lag_ms": 200})
        producer.send("flights", b"AA").result(timeout=60)
        deadline = monotonic_s() + 60
        while True:
            (state,) = admin.describe_topics(["flights"])
            if state.tiered_end == 1:
                break
            assert monotonic_s() < deadline, state
            block_s(0.2)
        assert len(state.replicas) == 3
        assert str(admin.describe_tier("flights").uri).startswith("s3://pk-tier/tables/flights/")


def test_the_services_mount_files_and_volumes_that_exist() -> None:
    found = compose()
    services = found["services"]
    for name, service in services.items():
        assert ("image" in service) or ("build" in service), name
        assert set(service.get("depends_on", {})) <= set(services)
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).is_file(), source
            else:
                assert source in found["volumes"], source
    for name in NODES:
        assert f"{name}:{DATA}" in services[name]["volumes"]
        assert services[name]["command"] == ["server", "start", "--config", "/etc/pk/node.toml"]
        assert any(each.endswith(":/etc/pk/node.toml:ro") for each in services[name]["volumes"])
        key, secret = (
            services["s3"]["environment"][f"ROOT_{it}_KEY"] for it in ("ACCESS", "SECRET")
        )
        assert services[name]["environment"]["AWS_ACCESS_KEY_ID"] == key
        assert services[name]["environment"]["AWS_SECRET_ACCESS_KEY"] == secret
    assert services["s3"]["command"][:2] == ["--port", ":7070"]
    build = services["node1"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_prometheus_and_grafana_find_the_nodes_and_the_dashboard() -> None:
    mounted = {
        target: (DEPLOY / source).resolve()
        for service in ("prometheus", "grafana")
        for source, target, _ in (v.split(":") for v in compose()["services"][service]["volumes"])
    }
    scrape = yaml.safe_load(mounted["/etc/prometheus/prometheus.yml"].read_text())
    (job,) = scrape["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"{name}:9300" for name in NODES]}]
    (rules,) = scrape["rule_files"]
    assert mounted[f"/etc/prometheus/{rules}"] == ROOT / "examples" / "monitoring" / "alerts.yml"
    provisioning = "/etc/grafana/provisioning"
    (source,) = yaml.safe_load(mounted[f"{provisioning}/datasources/pk.yml"].read_text())[
        "datasources"
    ]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load(mounted[f"{provisioning}/dashboards/pk.yml"].read_text())[
        "providers"
    ]
    folder = provider["options"]["path"]
    assert mounted[f"{folder}/pk.json"] == ROOT / "examples" / "monitoring" / "dashboard.json"


def test_the_dockerfile_names_what_exists() -> None:
    found = instructions()
    known = {"FROM", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL"}
    known |= {"HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in found} == known
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stages = set()
    for name, rest in found:
        if name == "FROM":
            image, _, stage = rest.partition(" AS ")
            stages.add(stage)
            assert image.startswith("python:" + project["requires-python"].removeprefix(">="))
        elif name == "COPY" and rest.startswith("--from="):
            assert rest.removeprefix("--from=").split()[0] in stages
        elif name == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1])
        elif name == "RUN":
            for extras in re.findall(r"\.whl\)\[([\w,]+)\]", rest):
                assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert f"{project['name'].replace('-', '_')}-*.whl" in (DEPLOY / "Dockerfile").read_text()
    assert dict(found)["USER"] == "pk"
    kept = [
        line.removeprefix("!")
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert all((ROOT / name).exists() for name in kept)
    # without the folders that src/pk links to, the wheel would lack packages
    linked = {path.resolve().name for path in (ROOT / "src" / "pk").iterdir() if path.is_symlink()}
    assert linked | {"src", project["readme"], *project["license-files"]} <= set(kept)


def test_a_container_without_arguments_is_a_node(tmp_path: Path) -> None:
    last = dict(instructions())
    assert yaml.safe_load(last["ENTRYPOINT"]) == ["pk"]
    ports = ReservedPorts()
    listen, metrics = ports.draw(), ports.address()
    assert last["EXPOSE"].split() == ["9292", "9300"]
    assert last["VOLUME"] == DATA
    command = yaml.safe_load(
        localized(last["CMD"], {DATA: str(tmp_path), "0.0.0.0:9300": metrics, "9292": str(listen)})
    )
    assert last["STOPSIGNAL"] == "SIGTERM"
    # pk refuses to listen on every address without a name for clients; the test listens on one
    assert f"0.0.0.0:{listen}" in command
    assert command[command.index("--advertise") + 1] == f"127.0.0.1:{listen}"
    with running([each.replace("0.0.0.0", "127.0.0.1") for each in command], {}):
        wait_healthy(metrics)
        with AdminClient(f"127.0.0.1:{listen}") as admin:
            assert admin.list_topics() == []


def test_the_unit_starts_a_node(tmp_path: Path) -> None:
    service = unit()["Service"]
    program, *command = shlex.split(service["ExecStart"])
    assert program == "/opt/pk/bin/pk"
    assert command[-2:] == ["--config", "/etc/pk/node.toml"]
    assert f"/var/lib/{service['StateDirectory']}" == DATA
    ports = ReservedPorts()
    port, metrics = ports.draw(), ports.address()
    places = {DATA: str(tmp_path / "pk"), "0.0.0.0:9292": f"127.0.0.1:{port}",
              "log1.example.com:9292": f"localhost:{port}", "127.0.0.1:9300": metrics}  # fmt: skip
    config = tmp_path / "node.toml"
    config.write_text(localized((DEPLOY / "systemd" / "node.toml").read_text(), places))
    with running([*command[:-1], str(config)], {}):
        wait_healthy(metrics)
        with AdminClient(f"localhost:{port}") as admin:
            assert admin.list_topics() == []


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    parsed = unit()
    assert parsed.sections() == ["Unit", "Service", "Install"]
    if shutil.which("systemd-analyze") is None:
        pytest.skip("this machine has no systemd-analyze; the unit was parsed alone")
    # the verifier looks for the program and the user on this machine
    text = localized(
        (DEPLOY / "systemd" / "pk.service").read_text(),
        {parsed["Service"]["ExecStart"].split()[0]: str(shutil.which("true")),
         "User=pk\nGroup=pk\n": ""},
    )  # fmt: skip
    assert verified(tmp_path, text) == []
    assert verified(tmp_path, text.replace("RestartSec=", "RestartSeconds=")) != []


def verified(folder: Path, text: str) -> list[str]:
    """The complaints of systemd-analyze about a unit."""
    path = folder / "pk.service"
    path.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return [line for line in done.stderr.splitlines() if "pk.service" in line]


def test_the_image_builds() -> None:
    builder = next((each for each in ("docker", "podman") if shutil.which(each)), None)
    if builder is None or subprocess.run([builder, "info"], capture_output=True).returncode:
        pytest.skip("no container builder answers on this machine; the Dockerfile was parsed alone")
    command = [builder, "build", "-q", "-f", str(DEPLOY / "Dockerfile"), "-t", "pk-test", str(ROOT)]
    subprocess.run(command, check=True, timeout=280)
    shown = subprocess.run(
        [builder, "run", "--rm", "pk-test", "version"], check=True, capture_output=True, text=True
    )
    assert "pyarrow" in shown.stdout
