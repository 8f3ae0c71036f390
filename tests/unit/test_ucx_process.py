"""ucx and the process it runs in: short of descriptors or threads, forked, and killed with a child that lives on."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.needs("ucx")


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
                os._exit(0 if told and time.monotonic() - start < 1 else 1)
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
