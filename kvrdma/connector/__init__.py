"""The vLLM connector: ``{"kv_connector": "KvRdmaConnector", "kv_connector_module_path": "kvrdma.connector"}``.

The only part of kvrdma that imports vLLM. vLLM imports it in the API server, the engine core and every worker.
"""

from __future__ import annotations

from kvrdma.connector.attention import (
    check_compressed_kernel_split,
    get_current_attn_backend,
    get_current_attn_backends,
    get_current_attn_backends_and_specs,
    kv_connector_may_load_foreign_kv,
)
from kvrdma.connector.facade import KvRdmaConnector

__all__ = [
    "KvRdmaConnector",
    "check_compressed_kernel_split",
    "get_current_attn_backend",
    "get_current_attn_backends",
    "get_current_attn_backends_and_specs",
    "kv_connector_may_load_foreign_kv",
]
