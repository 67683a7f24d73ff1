"""Start and stop of Apache Kafka: one JVM, KRaft, on loopback, in a folder of its own."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

from bench import processes
from bench.sides import SideFailed
from pk.sparkconnector import jars, java

VERSION = "4.1.1"
COORDINATES = (f"org.apache.kafka:kafka_2.13:{VERSION}", f"org.apache.kafka:kafka-tools:{VERSION}")
HERE = Path(__file__).parent
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 30
CLUSTER_ID = "cGstYmVuY2gta2Fma2EtMQ"


def options(name: str) -> list[str]:
    """Return the JVM options of a file in this folder."""
    lines = (HERE / name).read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def properties(name: str) -> dict[str, str]:
    """Return the settings of a file in this folder."""
    pairs = (
        line.partition("=")
        for line in (HERE / name).read_text().splitlines()
        if line and not line.startswith("#")
    )
    return {key: value for key, _, value in pairs}


def free_port() -> int:
    """Return a port on which no process listens at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class KafkaBroker:
    """One broker process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._classpath = ""
        self.address = ""

    def command(self, jvm: str, program: str, *arguments: str) -> list[str]:
        """Return the command of a program of Kafka's jars, with the JVM options of
        `kafka/<jvm>`.
        """
        if not self._classpath:
            found = jars.resolve(COORDINATES, transitive=True)
            self._classpath = ":".join(str(jar) for jar in found)
        return [
            java.find_java().command,
            *options(jvm),
            "-cp",
            self._classpath,
            program,
            *arguments,
        ]

    def start(self, folder: Path) -> None:
        """Format the storage, start, wait for the port.  Raises `SideFailed` with the log's end."""
        folder.mkdir(parents=True, exist_ok=True)
        port, controller = free_port(), free_port()
        text = (HERE / "server.properties").read_text()
        for name, value in (("PORT", port), ("CONTROLLER_PORT", controller), ("DIR", folder)):
            text = text.replace(f"@{name}@", str(value))
        config = folder / "server.properties"
        config.write_text(text)
        arguments = ("format", "-t", CLUSTER_ID, "-c", str(config))
        subprocess.run(
            self.command("client.options", "kafka.tools.StorageTool", *arguments),
            check=True,
            capture_output=True,
            timeout=START_TIMEOUT_S,
        )
        with (folder / "kafka.out").open("wb") as log:
            self._process = subprocess.Popen(
                self.command("jvm.options", "kafka.Kafka", str(config)),
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )
        self.address = f"127.0.0.1:{port}"
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        words = (folder / "kafka.out").read_text(errors="replace")[-2000:]
        self.stop()
        raise SideFailed(f"Apache Kafka did not start:\n{words}")

    def pids(self) -> list[int]:
        return [] if self._process is None else processes.children(self._process.pid)

    def stop(self) -> None:
        """Send SIGTERM (also to a stopped process), then SIGKILL."""
        if self._process is None:
            return
        processes.thaw([self._process.pid])
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
