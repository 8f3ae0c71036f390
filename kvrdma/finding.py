"""What a diagnosis says: one finding per check, in one of three colours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["green", "yellow", "red"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    """Names the check: a few words, the same on every host."""
    level: Level
    """green: good. yellow: works, but slow or by luck. red: does not work."""
    found: str
    """What is there."""
    why: str = ""
    """Why it matters; empty where green."""
    fix: str = ""
    """The command or setting that cures it; empty where green."""


def green(check: str, found: str) -> Finding:
    """Say that something is good."""
    return Finding(check, "green", found)


def yellow(check: str, found: str, why: str, fix: str) -> Finding:
    """Say that something works, but not well."""
    return Finding(check, "yellow", found, why, fix)


def red(check: str, found: str, why: str, fix: str) -> Finding:
    """Say that something does not work."""
    return Finding(check, "red", found, why, fix)
