"""What is special about cma: identities, rights, and threads that need nobody's help."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvrdma.blob import seal, unseal
from kvrdma.errors import (
    ConfigError,
    ConnectError,
    PeerIdentityError,
    PeerLostError,
    PeerPermissionError,
    RegistrationError,
    TransportUnavailableError,
)
from kvrdma.rows import as_rows
from kvrdma.testing import PeerProcess
from kvrdma.testing import target as at
from kvrdma.testing.target import PAGE, Reader, done, scattered
from kvrdma.transport import Completion, Device, PeerLost, ReadFailed, open_transport, wait
from kvrdma_cma import CmaTransport, denied
from kvrdma_cma.transport import _ADDRESS, _Address


def _altered(address: bytes, **changes: object) -> bytes:
    where = _Address._make(_ADDRESS.unpack(unseal("cma/address", 1, address)))
    return seal("cma/address", 1, _ADDRESS.pack(*where._replace(**changes)))  # type: ignore[arg-type]


@pytest.mark.needs("cma")
def test_reused_pid_is_refused() -> None:
    with PeerProcess() as process:
        process.call(at.open_target, CmaTransport, [PAGE], 1)
        address, keys = process.call(at.exports)
        start = _Address._make(_ADDRESS.unpack(unseal("cma/address", 1, address))).start_time
        transport = CmaTransport()
        with pytest.raises(PeerIdentityError, match=rf"tick {start} .* started at {start - 1}: the PID was reused"):
            transport.connect(_altered(address, start_time=start - 1), keys)
        transport.close()


def test_another_boot_is_refused() -> None:
    transport = CmaTransport()
    with pytest.raises(PeerIdentityError, match="another host, or this host was booted since"):
        transport.connect(_altered(transport.address(), boot_id=b"\1" * 16), [])
    transport.close()


def test_another_pid_namespace_is_refused_with_the_cure() -> None:
    transport = CmaTransport()
    with pytest.raises(PeerPermissionError, match=r"in PID namespace 7, this one in .*shareProcessNamespace"):
        transport.connect(_altered(transport.address(), pid_namespace=7), [])
    transport.close()


def test_process_that_has_exited() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    transport = CmaTransport()
    with pytest.raises(ConnectError, match=f"process {child.pid} cannot be opened: .*exited"):
        transport.connect(_altered(transport.address(), pid=child.pid), [])
    transport.close()


def _exec_sleep(state: SimpleNamespace) -> None:
    del state
    os.execvp("sleep", ["sleep", "60"])


@pytest.mark.needs("cma")
def test_process_that_runs_another_program_now() -> None:
    """Same PID, same start time, same pidfd: only the cookie in its memory tells."""
    process = PeerProcess()
    process.call(at.open_target, CmaTransport, [PAGE], 1)
    reader = Reader.open(CmaTransport(), PAGE)
    peer = reader.transport.connect(*process.call(at.exports))
    process._connection.send((_exec_sleep, ()))
    while b"sleep" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
        time.sleep(0.01)
    ended = reader.read(peer, reader.rows([(0, 0, 0, PAGE)]))
    assert isinstance(ended, ReadFailed)
    assert isinstance(ended.reason, PeerLostError) or "unmapped" in str(ended.reason)
    reader.transport.close()
    process.kill()


def _as_nobody(state: SimpleNamespace, address: bytes) -> str:
    del state
    os.setgid(65534)
    os.setuid(65534)
    try:
        CmaTransport().connect(address, [])
    except PeerPermissionError as error:
        return str(error)
    return "connected"


@pytest.mark.needs("root")
def test_missing_right_is_reported_with_cause_and_cure() -> None:
    transport = CmaTransport()
    with PeerProcess() as process:
        message = process.call(_as_nobody, transport.address())
    assert "process_vm_readv: Operation not permitted" in message
    assert "runs as user 0, this process as user 65534: run both as one user" in message
    assert "lacks CAP_SYS_PTRACE" in message
    transport.close()


@pytest.mark.parametrize(
    ("scope", "caps", "uid", "expected"),
    [
        ("1", "0", "5", ["ptrace_scope is 1", "CAP_SYS_PTRACE"]),
        ("0", "0", "6", ["user 6, this process as user 5", "CAP_SYS_PTRACE"]),
        ("0", f"{1 << 19:x}", "5", ["seccomp"]),
        ("3", f"{1 << 19:x}", "5", ["ptrace_scope is 3"]),
    ],
)
def test_explanations(tmp_path: Path, scope: str, caps: str, uid: str, expected: list[str]) -> None:
    for name, user in (("self", "5"), ("42", uid)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "status").write_text(f"Name:\tx\nUid:\t9\t{user}\t9\t9\nCapEff:\t{caps}\n")
    (tmp_path / "sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "sys/kernel/yama/ptrace_scope").write_text(scope + "\n")
    text = denied.explain(42, tmp_path)
    assert all(part in text for part in expected)
    assert len(text.split("; ")) == len(expected) + 1  # and the way out


def test_reads_complete_without_the_callers_help() -> None:
    """Nobody polls; the bytes arrive and the descriptor becomes readable all the same."""
    owner = Reader.open(CmaTransport(), 64 * PAGE)
    owner.buffer[:] = at.pattern(3, 64 * PAGE)
    reader = Reader.open(CmaTransport(), 64 * PAGE)
    peer = reader.transport.connect(owner.transport.address(), [owner.region.key])
    rows = reader.rows(scattered(64, PAGE, 64, seed=1))
    read = reader.transport.read(peer, rows)
    assert wait([reader.transport], 30)
    reader.check(rows, [owner.buffer])
    done(reader.finish(read))
    reader.transport.close()
    owner.transport.close()


def test_gil_is_free_while_bytes_move() -> None:
    """A thread that needs the GIL goes on while a long batch is posted, copied and closed."""
    owner = Reader.open(CmaTransport(), 256 << 20)
    reader = Reader.open(CmaTransport(threads=1), 256 << 20)
    peer = reader.transport.connect(owner.transport.address(), [owner.region.key])
    turns, stop = [0], threading.Event()

    def spin() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=spin)
    thread.start()
    read = reader.transport.read(peer, reader.rows([(0, 0, 0, 256 << 20)]))
    before = turns[0]
    assert wait([reader.transport], 60)
    assert turns[0] > before
    stop.set()
    thread.join()
    done(reader.finish(read))
    reader.transport.close()
    owner.transport.close()


def test_memory_that_is_not_ours_cannot_be_registered() -> None:
    transport = CmaTransport()
    for addr, nbytes in ((16, PAGE), ((1 << 64) - PAGE, 2 * PAGE), (1 << 62, 1)):
        with pytest.raises(RegistrationError):
            transport.register(addr, nbytes, Device())
    transport.close()


@pytest.mark.parametrize("threads", [0, 65, -1])
def test_thread_count_out_of_range(threads: int) -> None:
    with pytest.raises(ConfigError, match=f"threads={threads}"):
        CmaTransport(threads=threads)


def test_forked_child_is_refused() -> None:
    """The threads do not survive a fork; the child must hear that and must not hang."""
    script = """
        import os
        from kvrdma.errors import TransportClosedError
        from kvrdma_cma import CmaTransport
        transport = CmaTransport()
        pid = os.fork()
        if pid == 0:
            try:
                transport.address()
            except TransportClosedError as error:
                assert "does not survive fork" in str(error)
                transport.close()
                os._exit(7)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    lines = "\n".join(line[8:] for line in script.splitlines())
    ended = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "7\n"


def test_unmapped_source_fails_and_is_named() -> None:
    """The peer unmaps memory without deregistering it: the read fails, other regions still work."""
    import mmap

    owner = CmaTransport()
    gone = mmap.mmap(-1, 4 * PAGE)
    stays = np.full(PAGE, 9, np.uint8)
    addr = np.frombuffer(gone, np.uint8).ctypes.data
    keys = [
        owner.register(addr, 4 * PAGE, Device()).key,
        owner.register(stays.ctypes.data, PAGE, Device()).key,
    ]
    reader = Reader.open(CmaTransport(), 4 * PAGE)
    peer = reader.transport.connect(owner.address(), keys)
    gone.close()
    ended = reader.read(peer, reader.rows([(0, 0, 0, PAGE)]))
    assert isinstance(ended, ReadFailed)
    assert "unmapped memory" in str(ended.reason)
    assert ended.reason.code == 14
    reader.buffer[:] = at.POISON
    rows = reader.rows([(0, 1, 0, PAGE)])
    done(reader.read(peer, rows))
    reader.check(rows, [stays, stays])
    reader.transport.close()
    owner.close()


def test_lost_peer_does_not_wait_behind_others() -> None:
    """Reads queued behind a long one of a healthy peer end at once when their own peer dies."""
    owner = Reader.open(CmaTransport(), 512 << 20)
    reader = Reader.open(CmaTransport(threads=1), 512 << 20)
    healthy = reader.transport.connect(owner.transport.address(), [owner.region.key])
    process = PeerProcess()
    process.call(at.open_target, CmaTransport, [PAGE], 1)
    doomed = reader.transport.connect(*process.call(at.exports))
    long = [reader.transport.read(healthy, reader.rows([(0, 0, 0, 512 << 20)])) for _ in range(3)]
    process.kill()
    seen: list[Completion] = []
    while not any(isinstance(c, PeerLost) and c.peer == doomed.id for c in seen):
        assert wait([reader.transport], 10)
        seen += reader.transport.poll()
    assert len([c for c in seen if not isinstance(c, PeerLost)]) < len(long)
    reader.transport.close()
    owner.transport.close()


def test_address_layout_is_fixed() -> None:
    """Both ends may run different builds: the layout of blobs is part of version 1."""
    assert _ADDRESS.size == struct.calcsize("<16sQiQQ16s") == 60
    assert as_rows([]).shape == (0, 4)


def test_without_proc_it_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise FileNotFoundError(2, "No such file or directory", "/proc/self/ns/pid")

    monkeypatch.setattr(denied, "pid_namespace", missing)
    with pytest.raises(TransportUnavailableError, match="/proc/self/ns/pid"):
        open_transport("cma")


@pytest.mark.needs("cma")
def test_a_few_bytes_are_there_when_read_returns() -> None:
    transport = CmaTransport()
    memory = np.arange(1, 2 * PAGE + 1, dtype=np.uint64).view(np.uint8)
    region = transport.register(memory.ctypes.data, memory.nbytes, Device())
    peer = transport.connect(transport.address(), [region.key])
    half = memory.nbytes // 2
    for rows, nbytes in ((1, PAGE), (8, 64), (1, 0)):
        memory[half:] = 0
        wanted = [(memory.ctypes.data + half + n * nbytes, 0, n * nbytes, nbytes) for n in range(rows)]
        read = transport.read(peer, as_rows(wanted))
        [completion] = transport.poll()  # without any wait
        assert (completion.read, completion.nbytes) == (read, rows * nbytes)  # type: ignore[union-attr]
        assert (memory[half : half + rows * nbytes] == memory[: rows * nbytes]).all()
        assert not memory[half + rows * nbytes :].any()
    transport.close()
