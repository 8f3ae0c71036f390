"""How long threads were ready to run while the kernel ran something else on their processors."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

_WAITED_AT = 1
"""Of the three numbers in ``/proc/PID/task/TID/schedstat``: nanoseconds on a run queue, without running."""


class Waits:
    """Adds up the waits of all threads that some processes have when it is made. A context manager."""

    def __init__(self, pids: Iterable[int]) -> None:
        """Open the accounts of their threads.

        Raises:
            OSError: a process is gone, or the kernel keeps no such account.
        """
        self._files: list[int] = []
        try:
            for pid in pids:
                for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
                    self._files.append(os.open(task / "schedstat", os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            self.close()
            raise

    def total_s(self) -> float:
        """Give the seconds that they have waited so far, each thread's added up."""
        return sum(int(os.pread(file, 96, 0).split()[_WAITED_AT]) for file in self._files) / 1e9

    def close(self) -> None:
        """Close them. Idempotent."""
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> Self:
        """Use as a context manager: closed at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()
