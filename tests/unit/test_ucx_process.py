"""ucx and the process it runs in: short of descriptors or threads, forked, and killed with a child that lives on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest

from kvrdma.testing import PeerProcess
from kvrdma.testing import target as at
from kvrdma.testing.target import PAGE, Reader, done
from kvrdma.transport import Completion, PeerLost, ReadDone, ReadFailed, wait
from kvrdma_ucx import UcxTransport

pytestmark = pytest.mark.needs("ucx")

BIG = 64 << 20


def _run(script: str, *argv: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, (ended.returncode, ended.stderr)
    return ended.stdout.strip()


@pytest.mark.parametrize("free", [0, 3, 7, 10, 20, 40])
def test_without_descriptors_it_is_unavailable_and_the_process_lives(free: int) -> None:
    """With 7 free descriptors UCX calls abort."""
    out = _run(
        """
        import os, resource, sys
        from kvrdma.errors import TransportUnavailableError
        from kvrdma_ucx import UcxTransport
        UcxTransport().close()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        # Every number below the limit but `free` of them is taken.
        top = max(map(int, os.listdir("/proc/self/fd")))
        taken = {int(fd) for fd in os.listdir("/proc/self/fd")}
        for fd in set(range(top + 1)) - taken:
            os.dup2(0, fd)
        limit = top + 1 + int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            UcxTransport()
        except TransportUnavailableError as error:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            print(f"of the {limit} file" in str(error), "ulimit -n" in str(error))
        UcxTransport().close()
        """,
        str(free),
    )
    assert out == "True True"


def test_without_threads_it_is_unavailable_and_the_process_lives() -> None:
    out = _run("""
        import os, resource
        from kvrdma.errors import TransportUnavailableError
        from kvrdma_ucx import UcxTransport, library
        library.load()
        from kvrdma_ucx import _ucx
        if os.geteuid() == 0:  # whom no limit holds
            os.setgid(65534)
            os.setuid(54321)
        for limit in (1, 2):
            resource.setrlimit(resource.RLIMIT_NPROC, (limit, 1000))
            try:
                UcxTransport()
            except TransportUnavailableError as error:
                print("ulimit -u" in str(error), f"may have {limit}" in str(error))
        """)
    assert out.splitlines() == ["True True"] * 2


def test_a_forked_child_is_told_to_spawn() -> None:
    out = _run("""
        import os, sys, time
        from kvrdma.errors import TransportUnavailableError
        from kvrdma_ucx import UcxTransport
        UcxTransport().close()
        child = os.fork()
        if child == 0:
            start = time.monotonic()
            try:
                UcxTransport()
            except TransportUnavailableError as error:
                told = "spawn" in str(error) and str(os.getppid()) in str(error)
                os._exit(0 if told and time.monotonic() - start < 10 else 1)
            os._exit(2)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        UcxTransport().close()
        """)
    assert out == "0"


def test_a_child_forked_before_ucx_may_use_it() -> None:
    out = _run("""
        import os
        from kvrdma_ucx import UcxTransport
        child = os.fork()
        if child == 0:
            UcxTransport().close()
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """)
    assert out == "0"


def test_a_forked_child_does_not_take_its_parents_outcomes() -> None:
    """The eventfd is shared: a poll that reads it in the child leaves the parent asleep."""
    out = _run("""
        import os
        from types import SimpleNamespace
        from kvrdma.errors import TransportClosedError
        from kvrdma.testing import target as at
        from kvrdma.transport import poll_until, wait
        from kvrdma_ucx import UcxTransport
        target = SimpleNamespace()
        at.open_target(target, UcxTransport, [at.PAGE], 1)
        reader = at.Reader.open(UcxTransport(), at.PAGE)
        peer = reader.transport.connect(*at.exports(target))
        read = reader.transport.read(peer, reader.rows([(0, 0, 0, at.PAGE)]))
        assert wait([reader.transport], 5)
        child = os.fork()
        if child == 0:
            try:
                reader.transport.poll()
            except TransportClosedError:
                os._exit(0)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), wait([reader.transport], 0))
        at.done(poll_until(reader.transport, read, 1)[-1])
        """)
    assert out == "0 True"


def _fork(state: SimpleNamespace) -> int:
    """Leave a child behind that does nothing for a while."""
    state.child = os.fork()
    if state.child == 0:
        time.sleep(30)
        os._exit(0)
    return int(state.child)


def test_a_killed_peer_is_lost_at_once_though_a_child_of_it_lives_on() -> None:
    with PeerProcess() as process:
        process.call(at.open_target, UcxTransport, [BIG], 1)
        reader = Reader.open(UcxTransport(), BIG)
        peer = reader.transport.connect(*process.call(at.exports))
        done(reader.read(peer, reader.rows([(0, 0, 0, PAGE)])))
        child = process.call(_fork)
        try:
            read = reader.transport.read(peer, reader.rows([(0, 0, 0, BIG)]))
            start = time.monotonic()
            process.kill()
            ended: list[Completion] = []
            while not any(isinstance(event, PeerLost) for event in ended):
                assert wait([reader.transport], start + 2 - time.monotonic()), "no loss within 2 s"
                ended += reader.transport.poll()
            assert [type(event) for event in ended] in ([ReadFailed, PeerLost], [ReadDone, PeerLost])
            assert ended[0].read == read  # type: ignore[union-attr]
            os.kill(child, 0)  # still there
        finally:
            os.kill(child, signal.SIGKILL)
            reader.transport.close()


def test_a_forked_child_keeps_its_own_sockets_and_harms_no_transport() -> None:
    out = _run("""
        import os, socket
        from types import SimpleNamespace
        from kvrdma.testing import target as at
        from kvrdma_ucx import UcxTransport
        mine, yours = socket.socketpair()
        listener = socket.create_server(("127.0.0.1", 0))
        target = SimpleNamespace()
        at.open_target(target, UcxTransport, [at.PAGE], 1)
        reader = at.Reader.open(UcxTransport(), at.PAGE)
        peer = reader.transport.connect(*at.exports(target))
        rows = reader.rows([(0, 0, 0, at.PAGE)])
        at.done(reader.read(peer, rows))
        child = os.fork()
        if child == 0:
            yours.sendall(b"alive")
            links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]]
            # 3 sockets are this script's.
            os._exit(sum(link.startswith("socket:") for link in links))
        sockets = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(sockets, mine.recv(5), listener.getsockname()[0])
        at.done(reader.read(peer, rows))
        reader.check(rows, target.buffers)
        """)
    assert out == "3 b'alive' 127.0.0.1"


def test_no_socket_of_a_connection_survives_exec() -> None:
    """subprocess closes what it inherits; os.system() and others do not."""
    out = _run("""
        import os, subprocess
        from types import SimpleNamespace
        from kvrdma.testing import target as at
        from kvrdma_ucx import UcxTransport
        target = SimpleNamespace()
        at.open_target(target, UcxTransport, [at.PAGE], 1)
        reader = at.Reader.open(UcxTransport(), at.PAGE)
        peer = reader.transport.connect(*at.exports(target))
        at.done(reader.read(peer, reader.rows([(0, 0, 0, at.PAGE)])))
        listing = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True)
        print(listing.stdout.count("socket:"))
        """)
    assert out == "0"
