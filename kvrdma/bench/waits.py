"""How long threads were ready to run while the kernel ran something else on their processors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_WAITED_AT = 1
"""Of the three numbers in ``/proc/PID/task/TID/schedstat``: nanoseconds on a run queue, without running."""


@contextmanager
def waits_of(pids: Iterable[int]) -> Iterator[Callable[[], float]]:
    """Give a function that adds up the seconds that the threads which these processes have now have waited so far.

    Raises:
        OSError: a process is gone, or the kernel keeps no such account.
    """
    with ExitStack() as opened:
        tasks = [task for pid in pids for task in sorted(Path(f"/proc/{pid}/task").iterdir())]
        files = [opened.enter_context((task / "schedstat").open("rb", buffering=0)).fileno() for task in tasks]
        yield lambda: sum(int(os.pread(file, 96, 0).split()[_WAITED_AT]) for file in files) / 1e9
