"""Makes ZMQ contexts where ZMQ itself would abort the process: libzmq asserts that descriptors do not run out."""

from __future__ import annotations

import os
import resource

import zmq

from kvrdma.errors import ConfigError

_NEEDED = 16
"""A context with its threads, a socket, its monitor and one connection take 12."""


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Make a context whose threads run already; sockets that come later fail by an error.

    Raises:
        ConfigError: there are too few descriptors left for it.
    """
    spare: list[int] = []
    try:
        spare.extend(os.eventfd(0, os.EFD_CLOEXEC) for _ in range(_NEEDED))
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise ConfigError(
            f"too few descriptors are left for a control channel, {_NEEDED} are needed: {error.strerror}; raise "
            f"`ulimit -n`, now {limit}",
            code=error.errno,
        ) from None
    finally:
        for descriptor in spare:
            os.close(descriptor)
    context = zmq.Context()
    context.socket(zmq.PAIR).close(0)
    return context
