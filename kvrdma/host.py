"""A host as its kernel describes it: this one, or a saved tree of another one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_SYS, _PROC, _DEV = Path("/sys"), Path("/proc"), Path("/dev")


@dataclass(frozen=True, slots=True)
class HostView:
    """Where to look, and with which environment."""

    sys: Path = _SYS
    proc: Path = _PROC
    dev: Path = _DEV
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @classmethod
    def saved(cls, sys: Path, proc: Path, dev: Path | None = None) -> HostView:
        """Look at copies of ``/sys`` and ``/proc``; the environment is that of ``proc/self/environ``."""
        try:
            text = (proc / "self/environ").read_text(errors="replace")
        except OSError:
            text = ""
        pairs = (entry.partition("=") for entry in text.replace("\n", "\0").split("\0") if "=" in entry)
        return cls(sys, proc, dev or sys.parent / "dev", {name: value for name, _, value in pairs})

    @property
    def live(self) -> bool:
        """Whether this is the host that the program runs on, so that things can be tried and not only read."""
        return self.sys == _SYS and self.proc == _PROC

    def text(self, path: Path) -> str:
        """Read a small file; empty where there is none or it may not be read."""
        try:
            return path.read_text(errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: Path, default: int = -1) -> int:
        """Read a whole number."""
        try:
            return int(self.text(path), 0)
        except ValueError:
            return default

    def entries(self, path: Path) -> list[Path]:
        """List a folder in the order of its names; empty where there is none."""
        try:
            return sorted(path.iterdir(), key=lambda entry: (len(entry.name), entry.name))
        except OSError:
            return []

    def status(self, name: str) -> str:
        """Give a field of ``/proc/self/status``."""
        for line in self.text(self.proc / "self/status").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return value.strip()
        return ""

    def link(self, path: Path) -> str:
        """Give what a symbolic link says; empty where it is none."""
        try:
            return str(path.readlink())
        except OSError:
            return ""
