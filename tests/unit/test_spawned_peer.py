"""The peer process of a link test on this host: how it starts, ends and is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kvrdma import wire
from kvrdma.bench.spawned_peer import EstablishedControl, SpawnedPeer
from kvrdma.errors import ControlError, PeerLostError, UnreachableError
from kvrdma.transport import Device


def test_silence_after_the_connection_was_established_is_a_lost_peer() -> None:
    asked: list[wire.Message] = []

    class Gone:
        def request(self, message: wire.Message, timeout_s: float) -> wire.Message:
            asked.append(message)
            raise UnreachableError(f"no answer within {timeout_s:g} s")

        def close(self) -> None: ...

    control = EstablishedControl(Gone())
    for _ in range(2):  # the second time without waiting
        with pytest.raises(PeerLostError, match="the peer was lost: no answer within 5 s"):
            control.request(wire.CloseLink(0), 5)
    assert len(asked) == 1


def test_a_spawned_peer_answers_and_ends_with_close() -> None:
    peer = SpawnedPeer(Device(), 60.0)
    assert peer.request(wire.CloseLink(0), 10) == wire.LinkClosed()
    peer.close()
    assert peer.process.returncode == 0


def test_a_killed_peer_is_reported_with_its_exit_code() -> None:
    peer = SpawnedPeer(Device(), 60.0)
    peer.process.send_signal(signal.SIGKILL)
    with pytest.raises(PeerLostError, match="the peer process ended with exit code -9"):
        peer.request(wire.CloseLink(0), 60)
    peer.close()


def test_a_peer_that_cannot_start_brings_its_traceback_home() -> None:
    with pytest.raises(ControlError, match=r"(?s)did not start.*Traceback.*device 'gpu' is unknown"):
        SpawnedPeer("gpu", 60.0)  # type: ignore[arg-type]


def test_a_peer_ends_at_its_deadline() -> None:
    peer = SpawnedPeer(Device(), 5.0)
    assert peer.process.wait(20) == 0
    peer.close()


def test_a_peer_ends_when_its_parent_is_killed() -> None:
    script = """
        import sys, time
        from kvrdma.bench.spawned_peer import SpawnedPeer
        from kvrdma.transport import Device
        print(SpawnedPeer(Device(), 600.0).process.pid, flush=True)
        time.sleep(600)
    """
    lines = "\n".join(line.strip() for line in script.splitlines())
    with subprocess.Popen([sys.executable, "-c", lines], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(json.loads(parent.stdout.readline()))
        parent.kill()
    deadline = time.monotonic() + 20
    while _running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _running(pid)


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
