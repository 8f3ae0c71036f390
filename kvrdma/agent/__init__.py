"""``KVTransferAgent``: KV transfer and remote KV storage for engines that are not vLLM."""

from __future__ import annotations

from kvrdma.agent.agent import KVTransferAgent
from kvrdma.agent.batch import ModelInput
from kvrdma.agent.config import AgentConfig, CacheFacts, TransferConfig
from kvrdma.agent.factory import AgentConnector, create_connector, register_connector
from kvrdma.agent.states import IntermediateTensors

__all__ = [
    "AgentConfig",
    "AgentConnector",
    "CacheFacts",
    "IntermediateTensors",
    "KVTransferAgent",
    "ModelInput",
    "TransferConfig",
    "create_connector",
    "register_connector",
]
