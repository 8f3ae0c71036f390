"""The ucx transport over RC of soft-RoCE, with the UCX of the guest's Debian: what is one-sided, what is refused."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from kvrdma.testing import PeerProcess, ProcessContract
from kvrdma.testing import target as at
from kvrdma.testing.target import PAGE, Reader, done
from kvrdma.transport import open_transport
from tests.helpers.faulty_pair import MODEL
from tests.helpers.tagged import SMALL, Side, pulls_and_is_fenced

NETDEV = os.environ.get("NETDEV", "")
pytestmark = [
    pytest.mark.needs("verbs"),
    pytest.mark.skipif(not NETDEV, reason="only the guest has a system UCX beside RDMA"),
]
open_ucx = functools.partial(open_transport, "ucx")
VERSION = subprocess.run(["ucx_info", "-v"], capture_output=True, text=True, check=True).stdout if NETDEV else ""
READS = "1.13." in VERSION
"""1.18 has no GET over soft-RoCE that it does not emulate."""
WIRED_BY_TCP = {"UCX_TLS": "rc_verbs,tcp", "UCX_IB_ASYNC_EVENTS": "n"}  # events abort 1.18: openucx/ucx#10432
WIRED_BY_UD = {**WIRED_BY_TCP, "UCX_TLS": "rc_verbs,ud_verbs", "UCX_UD_VERBS_ETH_DGID_CHECK": "n"}


def link_test(environ: Mapping[str, str], *options: str) -> tuple[int, dict[str, Any]]:
    sizes = ("--nbytes", "256KiB", "--block", "4KiB", "--iters", "2", "--pattern", "fragmented")
    told = subprocess.run(
        [sys.executable, "-m", "kvrdma", "link-test", "--transport", "ucx", "--json", *sizes, *options],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, **environ},
    )
    report: dict[str, Any] = json.loads(told.stdout)
    return told.returncode, report


@pytest.mark.parametrize("environ", [WIRED_BY_TCP, WIRED_BY_UD], ids=["tcp", "ud"])
def test_link_test_over_rc(environ: dict[str, str]) -> None:
    code, report = link_test(environ)
    assert code == 0, report
    assert (report["one_sided"], report["verified"]) == (READS, True)
    code, report = link_test(environ, "--require-rdma")
    if READS:
        assert (code, report["one_sided"], report["verified"]) == (0, True, True)
    else:
        assert (code != 0, report["error"]) == (True, "NotOneSidedError")


def test_tcp_alone_is_refused_where_rdma_is_required() -> None:
    code, report = link_test({"UCX_TLS": "tcp"}, "--require-rdma")
    assert code != 0
    assert report["error"] == "NotOneSidedError"


def test_tcp_alone_is_said_to_be_served() -> None:
    code, report = link_test({"UCX_TLS": "tcp"})
    assert code == 0, report
    assert (report["one_sided"], report["verified"]) == (False, True)


@pytest.fixture
def over_rc(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process and those it starts; UCX reads its settings when it opens a context."""
    for name, value in WIRED_BY_TCP.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("over_rc")
class TestUcxOverRc(ProcessContract):
    factory = open_ucx
    timeout_s = 120.0
    works_while_stopped = READS

    @pytest.mark.skipif(READS, reason="1.13 aborts who connects over RC to a peer that has died (ucp_request.c:684)")
    def test_peer_restarted(self) -> None:
        super().test_peer_restarted()


@pytest.mark.usefixtures("over_rc")
def test_rows_between_two_processes() -> None:
    with PeerProcess() as process:
        process.call(at.open_target, open_ucx, [64 * PAGE], 1)
        reader = Reader.open(open_ucx(), 64 * PAGE)
        peer = reader.transport.connect(*process.call(at.exports))
        assert peer.one_sided == READS
        assert peer.via.startswith("rc_verbs/rxe0:1")
        rows = reader.rows([(i * PAGE, 0, (63 - i) * PAGE, 1000) for i in range(64)])
        done(reader.read(peer, rows))
        reader.check(rows, [at.pattern(1, 64 * PAGE)])
        reader.transport.close()


@pytest.mark.usefixtures("over_rc")
def test_an_engine_pulls_and_its_fence_holds() -> None:
    producer, consumer = (Side(MODEL, transport=open_ucx, config=SMALL) for _ in range(2))
    assert "rc_verbs" in pulls_and_is_fenced(producer, consumer).via[0]
    producer.close()
    consumer.close()
