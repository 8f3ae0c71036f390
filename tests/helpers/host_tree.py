"""Saved trees of hosts, from their description in ``tests/fixtures``.

One entry a line: ``path = content`` (with ``\\n``, ``\\t`` and ``\\0``), ``path -> target`` for a symbolic link; ``#``
begins a comment.
"""

from __future__ import annotations

from pathlib import Path

from kvrdma.host import HostView

FIXTURES = Path(__file__).parent.parent / "fixtures"


def build(name: str, root: Path) -> HostView:
    """Make the tree of a fixture under ``root``."""
    for line in (FIXTURES / f"{name}.tree").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        path, _, target = line.partition(" -> ")
        if target:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(target)
            continue
        path, _, content = line.partition(" = ")
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        text = content.replace("\\n", "\n").replace("\\t", "\t").replace("\\0", "\0")
        (root / path).write_text(text + "\n")
    return HostView.saved(root / "sys", root / "proc")
