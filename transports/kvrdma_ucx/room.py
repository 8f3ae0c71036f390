"""Whether this process has the file descriptors and threads that UCX is about to take: without, UCX aborts it."""

from __future__ import annotations

import fcntl
import resource
import threading

from kvrdma.errors import TransportUnavailableError

FILES = 64
"""Descriptors a transport must find free; one takes about 30 and every peer two."""
_THREADS = 2  # UCX's own and ours
_MOST_LOOKED_AT = 1 << 20


def check_room() -> None:
    """Refuse to open a transport that would end the process.

    Raises:
        TransportUnavailableError: too few free file descriptors, or no thread can be started.
    """
    limit, free = resource.getrlimit(resource.RLIMIT_NOFILE)[0], free_files(FILES)
    if free < FILES:
        raise TransportUnavailableError(
            f"ucx: {free} of the {limit} file descriptors of this process are free, and UCX ends a process that runs "
            f"out: {FILES} are needed to open a transport; raise ulimit -n"
        )
    _start_threads()


def free_files(enough: int) -> int:
    """Count free file descriptors, up to ``enough``; from the top, where they are, and without opening any."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    free = 0
    top = _MOST_LOOKED_AT if limit in (-1, resource.RLIM_INFINITY) else min(limit, _MOST_LOOKED_AT)
    for fd in range(top - 1, -1, -1):
        try:
            fcntl.fcntl(fd, fcntl.F_GETFD)
        except OSError:
            free += 1
            if free == enough:
                break
    return free


def _start_threads() -> None:
    done = threading.Event()
    threads: list[threading.Thread] = []
    try:
        for _ in range(_THREADS):
            thread = threading.Thread(target=done.wait, name="kvrdma-ucx-room", daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError as error:
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        allowed = "any number" if limit < 0 else str(limit)
        raise TransportUnavailableError(
            f"ucx: {error}, and UCX ends a process that cannot have the {_THREADS} it needs: "
            f"{threading.active_count()} Python threads run here, and this user may have {allowed}; raise ulimit -u "
            "or the pids limit of the container"
        ) from error
    finally:
        done.set()
        for thread in threads:
            thread.join()
