"""Answers consumers that ask for the ranks of this engine, from the scheduler's process."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from kvrdma.errors import IncompatibleError, MessageError
from kvrdma.wire import DescribeRanks, Message, RankDescription, RanksDescribed, askers_of


class RankDirectory:
    """The descriptions of an engine's ranks. Thread-safe."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._lock = threading.Lock()
        self._ranks: dict[tuple[int, int], RankDescription] = {}

    def replace(self, ranks: Mapping[tuple[int, int], RankDescription]) -> None:
        """Describe these ranks from now on."""
        with self._lock:
            self._ranks = dict(ranks)

    def answer(self, message: Message) -> Message:
        """Answer one message.

        Raises:
            IncompatibleError: another engine is asked for, or a rank it does not have.
            MessageError: a message that a scheduler does not answer.
        """
        if not isinstance(message, DescribeRanks):
            raise MessageError(f"a scheduler listens here, and does not answer {askers_of(message)}: check the port")
        if message.engine_id != self._engine_id:
            raise IncompatibleError(
                f"engine {message.engine_id} is asked for, engine {self._engine_id} runs here: it was restarted or "
                "replaced, and the blocks of the reference are gone"
            )
        with self._lock:
            missing = [rank for rank in message.ranks if rank not in self._ranks]
            if missing:
                raise IncompatibleError(
                    f"engine {self._engine_id} has no ranks {missing}: {len(self._ranks)} are known here; check the "
                    "parallel sizes in the reference"
                )
            return RanksDescribed(tuple(self._ranks[rank] for rank in message.ranks))
