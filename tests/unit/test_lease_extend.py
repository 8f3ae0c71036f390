"""A publication can be held longer than the setting says, never shorter."""

from __future__ import annotations

from kvrdma.lease import End, Ended, FenceTable, LeaseBook


def test_an_extended_lease_ends_when_it_was_told_to() -> None:
    book = LeaseBook(FenceTable(4), lease_s=30.0)
    book.publish("kept", now_s=100.0)
    book.publish("other", now_s=100.0)
    assert book.extend("kept", deadline_s=580.0)
    book.expire(130.0)
    assert book.take_ended() == [Ended("other", End.EXPIRED)]
    book.expire(579.9)
    assert book.take_ended() == []
    book.expire(580.0)
    assert book.take_ended() == [Ended("kept", End.EXPIRED)]


def test_it_is_never_shortened_and_an_ended_one_stays_ended() -> None:
    book = LeaseBook(FenceTable(4), lease_s=30.0)
    book.publish("r", now_s=100.0)
    assert book.extend("r", deadline_s=110.0)
    book.expire(129.9)
    assert "r" in book
    book.withdraw("r")
    assert not book.extend("r", deadline_s=1000.0)
    assert not book.extend("never", deadline_s=1000.0)
