"""`kvrdma doctor --metrics`: what a vLLM server's counts mean."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Callable

import pytest

from kvrdma.doctor.vllm_metrics import examine_server, read_metrics
from kvrdma.finding import Finding

HEALTHY = """
# HELP vllm:kvrdma_pull_seconds Time
vllm:kvrdma_pull_seconds_count{engine="0",model_name="m"} 8.0
vllm:kvrdma_pull_seconds_sum{engine="0",model_name="m"} 0.4
vllm:kvrdma_pull_bytes_sum{engine="0",model_name="m"} 8e+09
vllm:kvrdma_read_seconds_sum{engine="0",model_name="m"} 0.32
vllm:kvrdma_requests_loaded_total{engine="0",model_name="m"} 4.0
vllm:kvrdma_leases_held{engine="0",model_name="m"} 0.0
vllm:num_requests_running{engine="0",model_name="m"} 0.0
"""


def sample(name: str, value: float) -> str:
    return f'vllm:kvrdma_{name}{{engine="0",model_name="m"}} {value}\n'


def levels(text: str) -> dict[str, str]:
    return {finding.check: finding.level for finding in read_metrics(text)}


def one(text: str, check: str) -> Finding:
    (finding,) = (finding for finding in read_metrics(text) if finding.check == check)
    return finding


def test_a_server_that_pulls_is_green() -> None:
    assert levels(HEALTHY) == {"transfers": "green", "failed pulls": "green", "leases": "green"}
    assert "4 requests pulled in 8 pulls of ranks, 50.0 ms each, 25.00 GB/s" in one(HEALTHY, "transfers").found


@pytest.mark.parametrize(
    ("text", "level", "says"),
    [
        (sample("requests_without_params_total", 7), "red", "7 requests named no producer"),
        (sample("leases_expired_total", 3), "red", "3 publications expired unread"),
        (sample("leases_done_total", 5), "green", "5 publications were read"),
        (sample("breakers_open", 0), "yellow", "none yet"),
    ],
)
def test_no_transfers_have_a_cause(text: str, level: str, says: str) -> None:
    finding = one(text, "transfers")
    assert finding.level == level
    assert says in finding.found


def test_recomputed_requests_and_failures_are_named() -> None:
    text = (
        HEALTHY
        + 'vllm:kvrdma_pull_failures_total{engine="0",peer="p0:1",reason="PullTimeoutError"} 3.0\n'
        + sample("requests_not_offered_total", 2)
        + sample("fence_rejections_total", 1)
        + sample("breakers_open", 1)
        + sample("quarantined_pulls", 1)
    )
    assert one(text, "failed pulls").found == "3 PullTimeoutError from p0:1"
    assert "KVRDMA_FENCE_SLOTS" in one(text, "recomputed").fix
    assert one(text, "fence").level == "yellow"
    assert one(text, "breakers").level == "red"
    assert one(text, "quarantine").found == "1 pulls"


FAILED = 'vllm:kvrdma_pull_failures_total{engine="0",peer="p0:1",reason="PullTimeoutError"} 3.0\n'


@pytest.mark.parametrize("more", ["", sample("pull_seconds_count", 2), sample("requests_without_params_total", 7)])
def test_a_server_whose_loads_all_fail_is_red(more: str) -> None:
    """Some ranks may have pulled their part all the same."""
    text = FAILED + sample("requests_loaded_total", 0) + more
    assert one(text, "transfers").level == "red"
    assert one(text, "transfers").found == "none; 3 pulls of ranks failed"
    assert ("recomputed" in levels(text)) is ("without" in more)


def test_requests_without_a_producer_are_told_beside_those_that_were_loaded() -> None:
    text = HEALTHY + sample("requests_without_params_total", 7)
    assert one(text, "recomputed").found == "7 requests, beside 4 that were loaded"


def test_leaks_show_as_leases_without_requests_or_of_great_age() -> None:
    held = HEALTHY.replace('leases_held{engine="0",model_name="m"} 0.0', 'leases_held{engine="0"} 3.0')
    assert one(held, "leases").level == "yellow"
    busy = held.replace('requests_running{engine="0",model_name="m"} 0.0', 'requests_running{engine="0"} 2.0')
    assert one(busy, "leases").level == "green"
    assert one(busy + sample("oldest_lease_seconds", 7200), "leases").level == "red"


def test_another_connector_is_not_taken_for_ours() -> None:
    assert "NixlConnector" in one("vllm:nixl_num_failed_transfers_total 0\n", "metrics").found
    assert one("", "metrics").level == "red"


def test_metrics_are_fetched_and_silence_is_red() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(HEALTHY.encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert [finding.level for finding in examine_server(url)] == ["green"] * 3
        server.shutdown()
        thread.join(10)
    (finding,) = examine_server(url)
    assert finding.level == "red"
    assert examine_server("file:///etc/passwd")[0].level == "red"


def drip(line: socket.socket, head: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> None:
    line.sendall(head)
    while True:
        line.sendall(b"v")
        time.sleep(0.05)


def flood(line: socket.socket) -> None:
    line.sendall(OK)
    while True:
        line.sendall(b"vllm_x 1\n" * 100_000)


OK = b"HTTP/1.1 200 OK\r\n\r\n"
SERVERS: dict[str, tuple[Callable[[socket.socket], None], float, str]] = {
    "drips": (drip, 0.5, "no whole answer within 0.5 s"),
    "drips its head": (lambda line: drip(line, b"HTTP/1.1 200 OK\r\nX: "), 0.5, "no whole answer within"),
    "never ends": (flood, 60.0, "more than 32 MiB"),
    "is none": (lambda line: line.sendall(b"\0\xff" * 1000 + b"\n"), 10.0, "BadStatusLine: ?ÿ?"),
    "greets": (lambda line: line.sendall(b"SSH-2.0-x\r\n"), 10.0, "BadStatusLine: SSH-2.0-x"),
    "says too much": (lambda line: line.sendall(OK[:-2] + b"X: y\r\n" * 1000), 10.0, "got more than 100 headers"),
    "stops half-way": (lambda line: line.sendall(OK[:-2] + b"Content-Length: 99\r\n\r\nab"), 10.0, "2 bytes read"),
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_that_is_none_is_red_in_time(name: str) -> None:
    answer, timeout_s, says = SERVERS[name]

    def serve() -> None:
        line, _ = listener.accept()
        with line:
            try:
                line.recv(1000)
                answer(line)
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        began_s = time.monotonic()
        (finding,) = examine_server(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s)
        assert time.monotonic() - began_s < timeout_s + 5.0
    assert finding.level == "red"
    assert says in finding.found
    assert finding.found.isprintable()


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://a b/", "http://", "http://h:x", "http://\udcff", "https://", ""]
)
def test_an_address_that_is_none_is_red(url: str) -> None:
    (finding,) = examine_server(url)
    assert finding.level == "red"
    assert finding.found.isprintable()


@pytest.mark.parametrize("value", ["NaN", "+Inf", "1e400", "-"])
def test_numbers_that_are_none_count_nothing(value: str) -> None:
    assert levels(FAILED.replace("3.0", value))["transfers"] == "red"
    assert one(FAILED.replace("3.0", value), "failed pulls").found == "0 PullTimeoutError from p0:1"
