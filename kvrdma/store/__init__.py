"""A remote KV store: a process that reads the KV blocks of many engines and serves them after these are gone."""

from __future__ import annotations

from kvrdma.store.clients import Stores
from kvrdma.store.keys import PrefixKeys, prefix_keys
from kvrdma.store.port import Prompt, StorePort
from kvrdma.store.server import StoreServer

__all__ = ["PrefixKeys", "Prompt", "StorePort", "StoreServer", "Stores", "prefix_keys"]
