"""The control channel: small request/reply messages of ``kvrdma.wire`` over ZMQ.

A server answers from a thread of its own; a client belongs to the thread that uses it. With a secret both
sides prove that they hold it and encrypt (CURVE, with keys derived from it). Without one a server listens on
loopback only, unless told otherwise. Every wait has a deadline, and nothing a peer sends can stop a listener.
"""

from __future__ import annotations

from kvrdma.sidechannel.client import SideChannelClient
from kvrdma.sidechannel.endpoint import Endpoint
from kvrdma.sidechannel.server import ServerCounts, SideChannelServer

__all__ = ["Endpoint", "ServerCounts", "SideChannelClient", "SideChannelServer"]
