"""Finds out which process listens at a port, as far as this user may see."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_LISTENING = "0A"
_PROC = Path("/proc")


def port_holder(port: int) -> str:
    """Say for people who listens at a TCP port of this host; empty where that cannot be seen."""
    sockets = {f"socket:[{inode}]" for inode in _listeners(port)}
    if not sockets:
        return ""
    for folder in _PROC.glob("[0-9]*/fd"):
        try:
            if any(_target(link) in sockets for link in folder.iterdir()):
                words = (folder.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                me = ", this process" if folder.parent.name == str(os.getpid()) else ""
                return f"process {folder.parent.name} ({words[:200] or 'no command line'}{me})"
        except OSError:
            continue  # another user's, or it has just ended
    return "a process of another user or container"


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""  # closed meanwhile


def _listeners(port: int) -> set[str]:
    """Inodes of the sockets that listen at the port, in this network namespace."""
    found: set[str] = set()
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (_PROC / table).read_text().splitlines()[1:] if sys.platform == "linux" else []
        except OSError:
            lines = []
        for fields in map(str.split, lines):
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found
