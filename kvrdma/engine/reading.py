"""Posts the reads of a pull, the lease's word before and after the data, and judges the words.

The word after the data is a part of the same read (``then``), so that nothing waits for this process to notice that the
data has arrived; only where checksums are compared in between is it read by itself.
"""

from __future__ import annotations

from kvrdma.engine.loop import Loop
from kvrdma.engine.pull import Pull, ReadKey
from kvrdma.errors import LeaseRevokedError, PullError
from kvrdma.lease import WORD_NBYTES, FenceTable, Verdict, judge
from kvrdma.rows import RowTable, pack_rows


class Reading:
    """The reads in flight of one rank. Belongs to the data thread."""

    def __init__(self, fence: FenceTable, loop: Loop) -> None:
        """Land words in the spare words of ``fence``."""
        self._fence = fence
        self._loop = loop
        self._spare = list(range(len(fence) + fence.spare - 1, len(fence) - 1, -1))
        self.reads: dict[ReadKey, Pull] = {}

    @property
    def landing(self) -> int:
        """Count the spare words in use."""
        return self._fence.spare - len(self._spare)

    def word(self, pull: Pull, index: int) -> None:
        """Read the lease's word from a source.

        Raises:
            TransportError: it cannot be read.
            PullError: the reference names no word of the source, or there are too many pulls.
        """
        assert pull.peer
        link = pull.peer.links[index]
        key = ReadKey(link.transport.name, link.transport.read(link.peer, self._word_row(pull, index)))
        pull.asked_s = self._loop.now()
        pull.words[key] = index
        self.reads[key] = pull

    def _word_row(self, pull: Pull, index: int) -> RowTable:
        """Give the row that brings the lease's word from a source to a spare word, which is cleared."""
        assert pull.peer
        link, slot = pull.peer.links[index], pull.wanted.reference.lease.slot
        if WORD_NBYTES * (slot + 1) > link.peer.regions[link.fence_region].nbytes:
            raise PullError(f"the reference names lease slot {slot}, which rank {tuple(link.rank)} does not have")
        if index not in pull.landing:
            if not self._spare:
                raise PullError(
                    f"pull {pull.wanted.request_id!r}: too many pulls at the same time, all {self._fence.spare} words "
                    "for the fence are in use: wait for some to end"
                )
            pull.landing[index] = self._spare.pop()
        local = self._fence.clear_spare(pull.landing[index])
        return pack_rows((local, link.fence_region, WORD_NBYTES * slot, WORD_NBYTES))

    def data(self, pull: Pull, *, fenced: bool) -> None:
        """Read everything the plan names; every source's word has been seen live, or the reference says so.

        Args:
            pull: what to read.
            fenced: read each source's word once its data has arrived.

        Raises:
            TransportError: something cannot be read; other reads may be in flight.
            PullError: as ``word``.
        """
        assert pull.peer
        assert pull.plan
        pull.posted_s = self._loop.now()
        for index, (link, source) in enumerate(zip(pull.peer.links, pull.plan.sources, strict=True)):
            if len(source.batch):
                word = self._word_row(pull, index) if fenced else None
                key = ReadKey(link.transport.name, link.transport.read(link.peer, source.batch, word))
                pull.data[key] = index
                pull.unfenced.add(index)
                self.reads[key] = pull
        pull.posted = True
        pull.asked_s = self._loop.now()
        pull.post_s = pull.asked_s - pull.posted_s

    def judge(self, pull: Pull, index: int) -> bool:
        """Follow a word that has arrived; False if the source has not published yet.

        Raises:
            LeaseRevokedError: the lease has ended.
            DataError: it was live to the end, and the bytes that arrived are not the producer's.
        """
        waiting = pull.unfenced if pull.posted else pull.unopened
        if index not in waiting:
            return True  # nothing is read from this source
        verdict = judge(self._fence.word(pull.landing[index]), pull.wanted.reference.lease)
        if verdict is Verdict.NOT_YET and not pull.posted:
            return False
        if verdict is not Verdict.LIVE:
            raise LeaseRevokedError(_late(pull, self._loop.now()))
        waiting.discard(index)
        if pull.differs is not None and not waiting:
            raise pull.differs
        return True

    def release(self, pull: Pull) -> None:
        """Take back the words of a pull with nothing in flight."""
        self._spare.extend(pull.landing.values())
        pull.landing.clear()


def _late(pull: Pull, now_s: float) -> str:
    reference = pull.wanted.reference
    when = "before the data had arrived" if pull.posted else "before the data was read"
    return (
        f"pull {pull.wanted.request_id!r} of {reference.request_id!r} from engine {reference.engine_id}: the lease "
        f"ended {when}, {now_s - pull.wanted.started_s:.3f} s after the pull began"
    )
