"""Where tables for people go."""

from __future__ import annotations

import errno
from typing import Never

from rich.console import Console


class Terminal(Console):
    """A console whose reader may leave: rich would end the process with 1, which means something else here."""

    def on_broken_pipe(self) -> Never:
        """Let the error pass to ``whole_process``."""
        raise BrokenPipeError(errno.EPIPE, "the reader has gone")
