"""Two hosts on one machine: network namespaces joined by a cable, and commands run in them. Root only."""

from __future__ import annotations

import itertools
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

_ROOT = Path(__file__).parents[2]
_WITHOUT_DNS = 'mount --bind /dev/null /etc/resolv.conf; exec "$0" "$@"'
_numbers = itertools.count()
SECRET = "two hosts of a test share this"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """``hosts`` are the namespaces, ``addresses`` what they are reached by, ``device`` is in each."""

    device = "kvwire"

    def __init__(self, *, six: bool = False) -> None:
        number = next(_numbers)
        self.hosts = [f"kvh{os.getpid()}n{number}{side}" for side in "ab"]
        self.addresses = [f"fd77::{n}" if six else f"10.78.0.{n}" for n in (1, 2)]
        self.six = six
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for host in self.hosts:
                ip("netns", "add", host)
                stack.callback(ip, "netns", "del", host)
            self._join(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _join(self, stack: ExitStack) -> None:
        """Put ``device`` into both hosts and join the two."""
        raise NotImplementedError

    def _raise(self, side: int, mtu: int) -> None:
        host, address = self.hosts[side], self.addresses[side]
        ip("-n", host, "link", "set", "lo", "up")
        ip("-n", host, "link", "set", self.device, "mtu", str(mtu), "up")
        # An address survives `link set down`, as it does on a cable that is pulled.
        keep = f"echo 1 > /proc/sys/net/ipv6/conf/{self.device}/keep_addr_on_down"
        ip("netns", "exec", host, "sh", "-c", keep)
        nodad = ["nodad"] if self.six else []
        ip("-n", host, "addr", "add", f"{address}/{64 if self.six else 24}", "dev", self.device, *nodad)

    def endpoint(self, side: int, port: int) -> str:
        address = self.addresses[side]
        return f"[{address}]:{port}" if self.six else f"{address}:{port}"


class VethHosts(Hosts):
    """Joined by a veth pair: no delay and no loss, and as fast as the kernel."""

    def __init__(self, *, six: bool = False, mtus: tuple[int, int] = (1500, 1500)) -> None:
        super().__init__(six=six)
        self.mtus = mtus

    def _join(self, stack: ExitStack) -> None:
        del stack  # the cable goes with the hosts
        one, other = self.hosts
        ends = ["netns", one, "type", "veth", "peer", "name", self.device, "netns", other]
        ip("link", "add", self.device, *ends)
        for side, mtu in enumerate(self.mtus):
            self._raise(side, mtu)

    def cable(self, state: str) -> None:
        """Set the first host's end ``"up"`` or ``"down"``."""
        ip("-n", self.hosts[0], "link", "set", self.device, state)


def command(host: str, *words: str) -> list[str]:
    """A command in a host, with processes of its own: they cannot read those of the other host.

    ``ip netns exec`` also gives it a ``/sys`` of its own, where UCX looks for devices, and mounts that are seen there
    only: no name server, which nobody could reach.
    """
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["ip", "netns", "exec", host, *alone, "sh", "-c", _WITHOUT_DNS, *words]


def environment(device: str, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVRDMA_", "UCX_"))}
    chosen = {"UCX_NET_DEVICES": device, "UCX_TLS": "tcp", "KVRDMA_SECRET": SECRET, "PYTHONUNBUFFERED": "1"}
    return {**kept, **chosen, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), **more}


def kvrdma(
    host: str, device: str, *words: str, timeout_s: float = 60.0, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `kvrdma` in a host to its end."""
    return subprocess.run(
        command(host, sys.executable, "-m", "kvrdma", *words),
        env=environment(device, **more),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class Background:
    """A command in a host, ended with the test."""

    def __init__(self, host: str, device: str, *words: str, log: Path) -> None:
        self._log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command(host, *words), env=environment(device), stdout=out, stderr=subprocess.STDOUT
            )

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until its output has a text."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline_s, f"no {text!r} in: {self.output()}"
            select.select([], [], [], 0.02)

    def output(self) -> str:
        return self._log.read_text()

    def end(self, timeout_s: float = 60.0) -> int:
        """Wait for its end."""
        return self.process.wait(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()


def serving(host: str, device: str, endpoint: str, log: Path) -> Background:
    """`kvrdma link-test serve` in a host, listening."""
    serve: Sequence[str] = (sys.executable, "-m", "kvrdma", "link-test", "serve", "--bind", endpoint)
    server = Background(host, device, *serve, log=log)
    server.wait_for("listening at")
    return server
