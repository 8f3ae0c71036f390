"""The vLLM connector: ``{"kv_connector": "KvRdmaConnector", "kv_connector_module_path": "kvrdma.connector"}``.

The only part of kvrdma that imports vLLM. vLLM imports it in the API server, the engine core and every worker.
"""

from __future__ import annotations

from kvrdma.connector.facade import KvRdmaConnector

__all__ = ["KvRdmaConnector"]
