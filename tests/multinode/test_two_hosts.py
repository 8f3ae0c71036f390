"""Two hosts and the line between them: link test, doctor, a cut, and requests of four ranks under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrdma.errors import ConnectError
from kvrdma.testing import PeerProcess
from kvrdma.testing import target as at
from kvrdma.testing.target import PAGE, Reader, done
from kvrdma_ucx import UcxTransport
from tests.helpers.hosts import Background, Hosts, VethHosts, ip, kvrdma, serving
from tests.helpers.two_hosts import Line, Pace, enter, joined_by

pytestmark = [pytest.mark.needs("root"), pytest.mark.needs("ucx"), pytest.mark.needs("netns")]
SMALL = ("--nbytes", "256K", "--block", "4K,64K", "--iters", "3", "--pattern", "fragmented", "--json")
PORT = 7471
BENCH = str(Path(__file__).parents[2] / "scripts/bench-two-node")
UCX_DEBIAN = next(iter((Path(__file__).parents[2] / ".deps/ucx-debian/usr/lib").glob("*-linux-gnu")), Path("/"))


@pytest.fixture(scope="module", params=["IPv4", "IPv6"])
def hosts(request: pytest.FixtureRequest) -> Iterator[VethHosts]:
    six = request.param == "IPv6"
    with VethHosts(six=six, mtus=(1500, 1500) if six else (1500, 9000)) as pair:
        yield pair


@pytest.fixture(scope="module", params=["IPv4", "IPv6"])
def lossy(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """A line of 1 ms that loses a frame in a thousand, at 10 Gbit/s: of netem where the kernel has it."""
    with joined_by(Line(delay_s=0.001, loss=0.001, gbit_s=10), six=request.param == "IPv6") as pair:
        yield pair


def test_a_link_test_and_doctor_between_two_hosts(hosts: VethHosts, tmp_path: Path) -> None:
    there, here = hosts.hosts
    endpoint = hosts.endpoint(0, PORT)
    with serving(there, hosts.device, endpoint, tmp_path / "serve.log"):
        ended = kvrdma(here, hosts.device, "link-test", "connect", endpoint, *SMALL)
        assert ended.returncode == 0, ended.stderr
        report = json.loads(ended.stdout)
        assert (report["verified"], report["one_sided"]) == (True, False)
        assert len(report["cases"]) == 2
        strict = kvrdma(here, hosts.device, "link-test", "connect", endpoint, "--require-rdma", *SMALL)
        assert strict.returncode == 8, strict.stderr
        examined = kvrdma(here, hosts.device, "doctor", "--json", "--peer", endpoint)
        found = {each["check"]: each for each in json.loads(examined.stdout)["findings"]}
        assert hosts.addresses[0] in found["peer"]["found"]
        assert f"from {hosts.addresses[1]}, path MTU {hosts.mtus[1]}" in found["peer"]["found"]
        assert ("peer mtu" in found) == (hosts.mtus[0] != hosts.mtus[1])
        network = [each for each in found.values() if "reads from there by" in each["found"]]
        assert any(each["level"] == "green" and "kvwire" in each["found"] for each in network), found


def launched(hosts: Hosts, tmp_path: Path, *bench: str) -> list[Background]:
    """Four ranks on two hosts: by the script, or over IPv6 by torchrun's variables alone, as Slurm or MPI would."""
    python, master, port = sys.executable, hosts.addresses[0], "29500"
    if not hosts.six:
        return [
            Background(host, hosts.device, BENCH, str(side), hosts.endpoint(0, 29500), "2", *bench,
                       log=tmp_path / f"{side}.log")
            for side, host in enumerate(hosts.hosts)
        ]  # fmt: skip
    ranks = [(2 * side + local, local, host) for side, host in enumerate(hosts.hosts) for local in range(2)]
    return [
        Background(
            host, hosts.device, "env", f"RANK={rank}", f"LOCAL_RANK={local}", "WORLD_SIZE=4", f"MASTER_ADDR={master}",
            f"MASTER_PORT={port}", python, "-m", "kvrdma.bench", *bench, log=tmp_path / f"{rank}.log",
        )
        for rank, local, host in ranks
    ]  # fmt: skip


def test_a_cut_line_gives_errors_in_time_and_recovers(tmp_path: Path) -> None:
    with VethHosts(six=True) as pair:
        there, here = pair.hosts
        endpoint = pair.endpoint(0, PORT)
        timing: dict[str, Any] = {"KVRDMA_READ_TIMEOUT_S": "2", "KVRDMA_CONTROL_TIMEOUT_S": "2"}
        with serving(there, pair.device, endpoint, tmp_path / "serve.log"):
            long = ("--nbytes", "16M", "--block", "4K", "--iters", "100000", "--json")
            words = (sys.executable, "-m", "kvrdma", "link-test", "connect", endpoint, *long)
            with Background(here, pair.device, "env", *(f"{k}={v}" for k, v in timing.items()), *words,
                            log=tmp_path / "connect.log") as run:  # fmt: skip
                run.wait_for("1/3 ")  # the measured reads have begun
                pair.cable("down")
                began_s = time.monotonic()
                assert run.end(60) in (3, 9), run.output()
                assert time.monotonic() - began_s < 30
                assert '"verified": false' in run.output()
            refused = kvrdma(here, pair.device, "link-test", "connect", endpoint, *SMALL, **timing)
            assert refused.returncode == 3, refused.stderr
            pair.cable("up")
            again = kvrdma(here, pair.device, "link-test", "connect", endpoint, *SMALL, **timing)
            assert again.returncode == 0, again.stderr


@pytest.mark.needs("tun")
def test_a_link_test_and_doctor_over_a_line_that_loses_frames(lossy: Hosts, tmp_path: Path) -> None:
    there, here = lossy.hosts
    endpoint = lossy.endpoint(0, PORT)
    with serving(there, lossy.device, endpoint, tmp_path / "serve.log"):
        ended = kvrdma(here, lossy.device, "link-test", "connect", endpoint, *SMALL)
        assert ended.returncode == 0, ended.stderr
        report = json.loads(ended.stdout)
        assert report["verified"]
        assert report["cases"][0]["total_ms"]["best"] > 2.0, "there and back again"
        examined = kvrdma(here, lossy.device, "doctor", "--json", "--peer", endpoint)
        found = [each for each in json.loads(examined.stdout)["findings"] if "reads from there by" in each["found"]]
        assert any(each["level"] == "green" and lossy.device in each["found"] for each in found), found


@pytest.mark.needs("tun")
def test_requests_of_four_ranks_over_a_line_that_loses_frames(lossy: Hosts, tmp_path: Path) -> None:
    sizes = ["producer.tp=2", "consumer.tp=2", "consumer.block=32", "requests=8", "prompt.tokens=128",
             'model={"layers":2,"kv_heads":4,"head_dim":32}', "failures.withdraw=0.2"]  # fmt: skip
    saved = tmp_path / "report.json"
    with ExitStack() as stack:
        runs = launched(lossy, tmp_path, *(f"--set={each}" for each in sizes), "--save", str(saved))
        for run in runs:
            stack.enter_context(run)
        codes = [run.end(100) for run in runs]
        assert set(codes) == {0}, "\n".join(run.output() for run in runs)
    report = json.loads(saved.read_text())
    assert report["verified"]
    assert (report["total"]["requests"], report["total"]["wrong_rows"]) == (8, 0)
    assert report["total"]["requests_done"] >= 8 - report["total"]["fence_rejections"]
    assert len(report["ranks"]) == 2
    carried = [counts for name, counts in report["nics"].items() if lossy.device in name]
    assert sum(counts["received"] for counts in carried) > report["total"]["nbytes"] > 0, report["nics"]
    assert report["ranks"][0]["pull_ms"]["p50"] > 2.0


@pytest.mark.needs("tun")
def test_a_line_is_no_faster_than_its_rate(tmp_path: Path) -> None:
    with joined_by(Line(delay_s=0, loss=0, gbit_s=0.02)) as line:
        there, here = line.hosts
        endpoint = line.endpoint(0, PORT)
        with serving(there, line.device, endpoint, tmp_path / "serve.log"):
            ended = kvrdma(here, line.device, "link-test", "connect", endpoint, *SMALL)
        assert ended.returncode == 0, ended.stderr
        took_ms = [case["total_ms"]["best"] for case in json.loads(ended.stdout)["cases"]]
        assert min(took_ms) > (256 << 10) * 8 / 0.02e9 * 1e3 * 0.9, "0.9: a queue may be empty when the clock starts"


def test_frames_leave_a_line_one_after_another() -> None:
    pace = Pace(gbit_s=8)  # a byte in a nanosecond
    assert pace.leaves_s(1.0, 1_000_000) == pytest.approx(1.001)
    assert pace.leaves_s(1.0, 1_000_000) == pytest.approx(1.002)
    assert pace.leaves_s(2.0, 60_000_000) == pytest.approx(2.06), "an idle line saves nothing up"
    assert pace.leaves_s(2.001, 1) is None, "the queue is full"
    assert pace.leaves_s(2.02, 1_000_000) == pytest.approx(2.061)


def _into_the_void(state: SimpleNamespace, address: bytes, keys: list[bytes], lost: str, device: str) -> dict[str, Any]:
    """Connect to a host whose packets go nowhere, and go on reading from another peer meanwhile."""
    subprocess.run(["ip", "neigh", "replace", lost, "lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", device],
                   check=True)  # fmt: skip
    at.open_target(state, UcxTransport, [PAGE], 5)
    reader = Reader.open(UcxTransport(connect_timeout_s=3), PAGE)
    peer = reader.transport.connect(*at.exports(state))
    errors: list[str] = []

    def connect() -> None:
        try:
            reader.transport.connect(address, keys)
        except ConnectError as error:
            errors.append(str(error))

    thread = threading.Thread(target=connect)
    thread.start()
    reads = 0
    while thread.is_alive():
        done(reader.read(peer, reader.rows([(0, 0, 0, PAGE)]), 2.0))
        reads += 1
    began_s = time.monotonic()
    reader.transport.close()
    state.transport.close()
    return {"errors": errors, "reads": reads, "close_s": time.monotonic() - began_s}


@pytest.mark.parametrize("old", [False, pytest.param(True, marks=pytest.mark.needs("ucx-debian"))])
def test_a_host_that_drops_packets_stops_nobody(hosts: VethHosts, *, old: bool) -> None:
    """UCX connects in the thread that serves all peers: unless told otherwise it stands still for two minutes."""
    there, here = hosts.hosts
    environ = {"UCX_NET_DEVICES": f"{hosts.device},lo"} | ({"KVRDMA_UCX_LIB": str(UCX_DEBIAN)} if old else {})
    with PeerProcess(environ) as target, PeerProcess(environ) as reader:
        target.call(enter, there)
        target.call(at.open_target, UcxTransport, [PAGE], 1)
        reader.call(enter, here)
        told = reader.call(_into_the_void, *target.call(at.exports), hosts.addresses[0], hosts.device)
    ip("-n", here, "neigh", "del", hosts.addresses[0], "dev", hosts.device)
    assert len(told["errors"]) == 1
    assert "did not answer within 3" in told["errors"][0]
    assert told["reads"] > 3
    assert told["close_s"] < 5
