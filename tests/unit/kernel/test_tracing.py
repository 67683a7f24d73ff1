"""Lines, metrics, the health endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
from pathlib import Path

import pytest

from pk import errors, tracing
from pk.clock import SystemClock


def test_a_line_is_one_line() -> None:
    out = io.StringIO()
    log = tracing.Log("broker", lambda: 1_735_689_600_123, out)
    log.info("ready", address="127.0.0.1:1", why='two\nlines and a "quote"', nothing="")
    assert out.getvalue() == (
        "2025-01-01T00:00:00.123Z INFO broker ready address=127.0.0.1:1 "
        'why="two\\nlines and a \\"quote\\"" nothing=""\n'
    )
    log.bug("handling", ValueError("x"))
    assert out.getvalue().count("\n") == 2
    assert "ValueError" in out.getvalue()


@pytest.mark.parametrize("cause", [OSError(errno.ENOSPC, "full"), BrokenPipeError(), ValueError()])
def test_a_line_that_cannot_be_written_ends_nothing(cause: Exception) -> None:
    """Unattended tasks log, too; the task that accepts connections is one of them."""

    class Full(io.StringIO):
        def flush(self) -> None:
            raise cause

    log = tracing.Log("broker", lambda: 0, Full())
    log.warning("fatal")
    log.bug("accepting", OSError(errno.EMFILE, "Too many open files"))


async def _get(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    except ConnectionResetError:  # a request that is too long is not read to its end
        answer = b""
    return answer


def test_the_endpoint() -> None:
    async def main() -> None:
        metrics, health = tracing.Metrics(), tracing.Health()
        metrics.counter("records", "records", ("topic",)).labels("t").inc(3)
        assert metrics.counter("records", "records", ("topic",)) is metrics.counter("records", "")
        lag = asyncio.create_task(tracing.watch_loop_lag(metrics, SystemClock()))
        server = await tracing.serve_http("127.0.0.1:0", metrics, health)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(errors.AddressInUse):
            await tracing.serve_http(f"127.0.0.1:{port}", metrics, health)
        body = await _get(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b'pk_records_total{topic="t"} 3.0' in body
        assert b"pk_loop_lag_ms" in body
        assert (await _get(port, b"GET /healthz HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert b"503" in await _get(port, b"GET /readyz?x=1 HTTP/1.1\r\n\r\n")
        health.not_ready = None
        assert b"200 OK" in await _get(port, b"GET /readyz HTTP/1.1\r\n\r\n")
        assert b"404" in await _get(port, b"GET / HTTP/1.1\r\n\r\n")
        assert await _get(port, b"x" * 20_000) == b""
        lag.cancel()
        await asyncio.gather(lag, return_exceptions=True)
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_texts_of_several_processes_become_one() -> None:
    own = b"# HELP pk_a what\n# TYPE pk_a gauge\npk_a 1.0\n"
    other = (
        b"# HELP pk_a what\n# TYPE pk_a gauge\npk_a 2.0\n"
        b'# HELP pk_b else\n# TYPE pk_b counter\npk_b_total{x="y"} 3.0\n'
    )
    assert tracing.merged(own, {"tier": other}).decode().splitlines() == [
        "# HELP pk_a what",
        "# TYPE pk_a gauge",
        "pk_a 1.0",
        'pk_a{role="tier"} 2.0',
        "# HELP pk_b else",
        "# TYPE pk_b counter",
        'pk_b_total{role="tier",x="y"} 3.0',
    ]


def test_one_endpoint_shows_the_processes_behind_it(tmp_path: Path) -> None:
    """A process that does not answer is left out, and shown as not answering."""

    async def story() -> None:
        tier = tracing.Metrics()
        tier.counter("files", "files").inc(7)
        address = f"unix:{tmp_path}/tier"
        behind = await tracing.serve_http(address, tier, tracing.Health())
        others = {"tier": address, "controller": f"unix:{tmp_path}/nobody"}
        front = await tracing.serve_http("127.0.0.1:0", tracing.Metrics(), tracing.Health(), others)
        port = front.sockets[0].getsockname()[1]
        body = await _get(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b'pk_files_total{role="tier"} 7.0' in body
        assert b'process_open_fds{role="tier"}' in body
        assert b'pk_up{role="tier"} 1.0' in body
        assert b'pk_up{role="controller"} 0.0' in body
        behind.close()
        front.close()

    asyncio.run(story())


def test_who_does_not_read_its_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each scrape of a hanging monitor would leave a connection and its answer behind."""
    monkeypatch.setattr(tracing, "REQUEST_TIMEOUT_S", 0.2)
    monkeypatch.setattr(tracing.Metrics, "text", lambda _: b"# HELP n " + b"x" * 64_000_000)

    async def main() -> None:
        server = await tracing.serve_http("127.0.0.1:0", tracing.Metrics(), tracing.Health())
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        me = {asyncio.current_task()}
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        while not (serving := asyncio.all_tasks() - me):
            await asyncio.sleep(0.01)
        await asyncio.wait(serving)
        got = b""
        with contextlib.suppress(ConnectionResetError):
            got = await reader.read()
        assert len(got) < 64_000_000
        writer.close()
        server.close()

    asyncio.run(main())


def test_times_by_stage_fall_into_cumulative_buckets() -> None:
    metrics = tracing.Metrics()
    times = metrics.stages("took_ms", "how long", ("read", "send"))
    for seconds in (0.0005, 0.0006, 0.003, 60.0):
        times.observe("read", seconds)
    text = metrics.text().decode()
    assert 'pk_took_ms_bucket{le="0.5",stage="read"} 1.0' in text
    assert 'pk_took_ms_bucket{le="1.0",stage="read"} 2.0' in text
    assert 'pk_took_ms_bucket{le="10000.0",stage="read"} 3.0' in text
    assert 'pk_took_ms_bucket{le="+Inf",stage="read"} 4.0' in text
    assert 'pk_took_ms_count{stage="read"} 4.0' in text
    assert 'pk_took_ms_sum{stage="read"} 60004.1' in text
    assert 'pk_took_ms_count{stage="send"} 0.0' in text
