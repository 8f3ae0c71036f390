"""Short of descriptors: an error that says so, where ZMQ by itself aborts the process, and work goes on afterwards."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from kvrdma import transport
from kvrdma.config import Config
from kvrdma.engine.opening import open_transports
from kvrdma.errors import ConfigError, TransportUnavailableError

PROGRAM = """
import os, resource, sys, time
from kvrdma.errors import ConfigError
from kvrdma.mailbox import Outbox
from kvrdma.sidechannel import Endpoint, SideChannelServer
from kvrdma.wire import Heartbeat, Noted

def leave(count):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + count, hard))

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
server = SideChannelServer(Endpoint("127.0.0.1", 0), lambda _: Noted())
outbox = Outbox()
used = 1 + max(map(int, os.listdir("/proc/self/fd")))
for count in range(40):
    leave(count)
    for make in (lambda: SideChannelServer(Endpoint("127.0.0.1", 0), lambda _: Noted()), Outbox):
        try:
            make().close()
        except ConfigError as error:
            assert "raise `ulimit -n`, now" in str(error), error
            assert count < 20, count
leave(0)
outbox.send(server.endpoint, Heartbeat(()), 30)
while not outbox.lost:
    time.sleep(0.01)
leave(40)
outbox.send(server.endpoint, Heartbeat(()), 30)
while outbox.pending():
    time.sleep(0.01)
assert outbox.lost == 1
outbox.close()
server.close()
"""


def test_control_channels_short_of_descriptors() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def open_nothing(**options: object) -> None:
    del options
    raise FileNotFoundError(2, "No such file or directory", "/proc/self/maps")


def test_a_transport_whose_kernel_interface_is_missing_is_one_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint("broken", f"{__name__}:open_nothing", "kvrdma.transports")
    monkeypatch.setattr(transport, "installed_transports", lambda: {"broken": point})
    with pytest.raises(TransportUnavailableError, match=r"'broken' cannot be opened here: .*'/proc/self/maps'"):
        transport.open_transport("broken")
    monkeypatch.setattr("kvrdma.engine.opening.installed_transports", lambda: {"broken": point})
    with pytest.raises(ConfigError, match="no transport works here: broken: "):
        open_transports(Config())
