"""What a type checker says about the options of clients (client/option_types)."""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints

from mypy import api

from pk import settings
from pk.client.option_types import ConsumerOptions, ProducerOptions
from pk.client.options import ALIASES

SNIPPET = """
from typing import Any
from pk import Consumer, Producer

Producer("h:1", linger_ms=5, compression="zstd", batch_size="1MiB")
Producer(bootstrap_servers="h:1", compression_type="lz4")
Consumer("h:1", group_id="g", enable_auto_commit=False, session_timeout_ms="45s")
dotted: dict[str, Any] = {"linger.ms": 5}
Producer("h:1", **dotted)
Producer("h:1", linger="5")
Producer("h:1", compression="snappy")
Producer("h:1", enable_idempotence="yes")
Consumer("h:1", max_poll_records="many")
"""
#: The lines of the snippet that are wrong, with a word of the error.
WRONG = {10: "linger", 11: "snappy", 12: "enable_idempotence", 13: "max_poll_records"}


def test_the_types_have_every_option() -> None:
    for scope, typed in (
        (settings.PRODUCER, ProducerOptions),
        (settings.CONSUMER, ConsumerOptions),
    ):
        aliases = {name for name, original in ALIASES.items() if original in scope.by_name}
        assert set(get_type_hints(typed)) == {*scope.by_name, *aliases, "bootstrap_servers"}


def test_mypy_refuses_what_the_client_would_refuse(tmp_path: Path) -> None:
    path = tmp_path / "snippet.py"
    path.write_text(SNIPPET)
    out, err, _ = api.run(["--no-error-summary", "--hide-error-context", str(path)])
    assert not err
    lines = [line for line in out.splitlines() if ": error:" in line]
    found = {int(line.split(":")[1]): line for line in lines}
    assert set(found) == set(WRONG), out
    for number, word in WRONG.items():
        assert word in found[number]
