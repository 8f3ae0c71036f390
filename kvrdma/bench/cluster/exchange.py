"""How the processes of a benchmark find each other: torchrun's store, or a dictionary between threads."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from kvrdma.errors import ConfigError, UnreachableError

_POLL_S = 0.002


class Exchange(Protocol):
    """Values by name, seen by all ranks."""

    def put(self, name: str, value: object) -> None:
        """Set a value that JSON can hold."""
        ...

    def get(self, name: str, timeout_s: float) -> Any:  # noqa: ANN401 - what was put
        """Wait for a value.

        Raises:
            UnreachableError: it did not come in time.
        """
        ...

    def add(self, name: str, number: int = 1) -> int:
        """Add to a counter and give its value; 0 reads it."""
        ...


def wait_count(exchange: Exchange, name: str, wanted: int, timeout_s: float) -> None:
    """Wait until a counter has reached a value.

    Raises:
        UnreachableError: it did not in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while exchange.add(name, 0) < wanted:
        if time.monotonic() > deadline_s:
            raise UnreachableError(
                f"{name!r} did not reach {wanted} within {timeout_s:g} s: another rank is gone or slow"
            )
        time.sleep(_POLL_S)


class ThreadExchange:
    """Between threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._changed = threading.Condition()

    def put(self, name: str, value: object) -> None:
        """Set a value."""
        with self._changed:
            self._values[name] = json.dumps(value)
            self._changed.notify_all()

    def get(self, name: str, timeout_s: float) -> Any:  # noqa: ANN401
        """Wait for a value."""
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._values, timeout_s):
                raise UnreachableError(f"{name!r} did not come within {timeout_s:g} s: another rank is gone or slow")
            return json.loads(self._values[name])

    def add(self, name: str, number: int = 1) -> int:
        """Add to a counter."""
        with self._changed:
            self._counts[name] = self._counts.get(name, 0) + number
            return self._counts[name]


class StoreExchange:
    """Over the rendezvous store that torchrun has opened."""

    def __init__(self, store: Any) -> None:  # noqa: ANN401 - torch.distributed.Store
        self._store = store

    def put(self, name: str, value: object) -> None:
        """Set a value."""
        self._store.set(f"kvrdma/{name}", json.dumps(value))

    def get(self, name: str, timeout_s: float) -> Any:  # noqa: ANN401
        """Wait for a value."""
        key = f"kvrdma/{name}"
        deadline_s = time.monotonic() + timeout_s
        try:
            # Asked again and again: a wait of the store that times out may leave its answer for the next request.
            while not self._store.check([key]):
                if time.monotonic() > deadline_s:
                    raise UnreachableError(
                        f"{name!r} did not come within {timeout_s:g} s: another rank is gone or slow"
                    )
                time.sleep(_POLL_S)
            return json.loads(self._store.get(key))
        except (RuntimeError, ValueError) as error:
            raise UnreachableError(f"{name!r} cannot be read from the rendezvous store: {error}") from error

    def add(self, name: str, number: int = 1) -> int:
        """Add to a counter."""
        try:
            return int(self._store.add(f"kvrdma/#{name}", number))
        except RuntimeError as error:
            raise UnreachableError(f"the rendezvous store is gone: {error}") from error


def from_launcher(environ: Mapping[str, str], timeout_s: float) -> tuple[StoreExchange, int, int]:
    """Join the other processes as torchrun's environment variables say.

    Returns:
        The exchange, this process's rank, and the number of processes.

    Raises:
        ConfigError: the variables are missing, or torch is.
        UnreachableError: the store at MASTER_ADDR:MASTER_PORT does not answer.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in environ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: launch it by `torchrun --nnodes N --nproc-per-node M -m kvrdma.bench ...`, "
            "or set them as your launcher knows them (Slurm: RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS)"
        )
    try:
        from torch.distributed.rendezvous import rendezvous
    except ImportError as error:
        raise ConfigError(f"the exchange between hosts needs torch ({error}): pip install 'kvrdma[torch]'") from error
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    try:
        store, _, _ = next(iter(rendezvous("env://", rank, world, timeout=timedelta(seconds=timeout_s))))
    except (RuntimeError, OSError, ValueError) as error:
        where = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        raise UnreachableError(f"the rendezvous store at {where} does not answer: {error}") from error
    return StoreExchange(store), rank, world


def node_rank(environ: Mapping[str, str] | None = None) -> int:
    """Give this process's number on its host; 0 where the launcher does not say."""
    environ = os.environ if environ is None else environ
    return int(environ.get("LOCAL_RANK", "0"))
