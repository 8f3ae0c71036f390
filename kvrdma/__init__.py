"""Moves the KV cache of large language models between engines by one-sided reads.

The names an engine needs can be imported from here; each is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrdma.config import Config
    from kvrdma.engine import Ended, Engine, PullDone, PullFailed, PullReleased
    from kvrdma.handshake import Identity
    from kvrdma.page_format import LayerSpec
    from kvrdma.reference import PullReference
    from kvrdma.topology import EngineShape, RankId

__version__ = "0.1.0"

_PLACES = {
    "Config": "kvrdma.config",
    "Ended": "kvrdma.engine",
    "Engine": "kvrdma.engine",
    "EngineShape": "kvrdma.topology",
    "Identity": "kvrdma.handshake",
    "LayerSpec": "kvrdma.page_format",
    "PullDone": "kvrdma.engine",
    "PullFailed": "kvrdma.engine",
    "PullReference": "kvrdma.reference",
    "PullReleased": "kvrdma.engine",
    "RankId": "kvrdma.topology",
}

__all__ = [
    "Config",
    "Ended",
    "Engine",
    "EngineShape",
    "Identity",
    "LayerSpec",
    "PullDone",
    "PullFailed",
    "PullReference",
    "PullReleased",
    "RankId",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'kvrdma' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
