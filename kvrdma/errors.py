"""Every error kvrdma raises, in one tree.

::

    KVRDMAError
    ├── ConfigError (ValueError)            a setting, option or environment variable is wrong
    ├── TopologyError (AssertionError)      the parallel sizes of two engines do not fit
    ├── AggregationError (AssertionError)   the outputs of an engine's workers cannot be combined
    ├── LayoutError (ValueError)            a cache tensor's layout is unknown or malformed
    ├── IncompatibleError                   two engines' layouts or models do not match (handshake)
    ├── PlanError (ValueError)              block ids or token ranges do not fit the layouts
    ├── ReshapeError (ValueError)           a reshape does not describe the page it is applied to
    ├── TransportError
    │   ├── TransportUnavailableError       a transport cannot be loaded here; names the extra to install
    │   ├── TransportClosedError            used after close()
    │   ├── RegistrationError               memory cannot be registered
    │   ├── RegionBusyError                 a region cannot be deregistered while reads write into it
    │   ├── RowsError (ValueError)          a row is out of bounds or names an unknown region
    │   ├── BlobError (ValueError)          an address or key is truncated, damaged or of another kind
    │   ├── ConnectError                    a peer cannot be reached
    │   │   ├── PeerIdentityError           another process, host or boot answers at that address
    │   │   ├── PeerPermissionError         the operating system denies reading the peer's memory
    │   │   └── NotOneSidedError            only emulated reads are possible and they were ruled out
    │   ├── PeerLostError                   the peer died, closed or became unreachable
    │   ├── ReadCancelledError              the reader disconnected or closed before the read ended
    │   ├── ReadTimeoutError                a read passed its deadline
    │   └── StaleRegionError                the peer has deregistered the memory that was read
    ├── LeaseError                          a lease cannot be opened: no slot free, or published twice
    ├── PullError                           a pull failed; each subclass is a reason
    │   ├── LeaseRevokedError               the lease ended before the data had arrived
    │   ├── PullTimeoutError                the pull passed its deadline
    │   ├── PullAbortedError                the caller gave it up
    │   └── PeerUnavailableError            the peer failed repeatedly: its circuit breaker is open
    └── ControlError                        a control message failed
        ├── UnreachableError                nobody answers at the control address
        ├── AuthenticationError             the shared secret does not match
        ├── ProtocolVersionError            the two sides speak different protocol versions
        ├── MessageError (ValueError)       a control message is malformed or too large
        └── DataError                       bytes that arrived are not the bytes that were sent

Errors of a native library carry its status in ``code`` (``None`` elsewhere).
"""

from __future__ import annotations


class KVRDMAError(Exception):
    """Base of every error this package raises on purpose.

    ``code`` keeps the native status (an ``errno`` or a ``ucs_status_t``) when there is one.
    """

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class ConfigError(KVRDMAError, ValueError):
    """A setting is unknown, malformed or out of range."""


class TopologyError(KVRDMAError, AssertionError):
    """The parallel sizes or head counts of two engines do not fit together."""


class AggregationError(KVRDMAError, AssertionError):
    """The outputs of an engine's workers cannot be combined."""


class LayoutError(KVRDMAError, ValueError):
    """A cache tensor is laid out in a way this package does not know."""


class IncompatibleError(KVRDMAError):
    """Two engines cannot exchange KV: names the field and both values."""


class PlanError(KVRDMAError, ValueError):
    """Block ids, token counts or addresses do not fit the layouts they are used with."""


class ReshapeError(KVRDMAError, ValueError):
    """A reshape does not describe the page or tensor it is applied to."""


class TransportError(KVRDMAError):
    """Base of everything a transport reports."""


class TransportUnavailableError(TransportError):
    """A transport cannot be loaded here; the message names what to install or set."""


class TransportClosedError(TransportError):
    """A transport was used after ``close()``."""


class RegistrationError(TransportError):
    """Memory could not be registered for reading."""


class RegionBusyError(TransportError):
    """A region is still the destination of a read that has not ended."""


class RowsError(TransportError, ValueError):
    """A row lies outside its region or names a region that does not exist; nothing was posted."""


class BlobError(TransportError, ValueError):
    """An address or key blob is truncated, damaged, of another version or of another transport."""


class ConnectError(TransportError):
    """A peer could not be reached."""


class PeerIdentityError(ConnectError):
    """The process found at an address is not the one that wrote the address."""


class PeerPermissionError(ConnectError):
    """The operating system denies reading the peer's memory; the message names cause and cure."""


class NotOneSidedError(ConnectError):
    """Reads from this peer would be emulated by its CPU and ``require_one_sided`` rules that out."""


class PeerLostError(TransportError):
    """The peer died, closed its transport or can no longer be reached."""


class ReadCancelledError(TransportError):
    """The reader itself disconnected or closed before the read ended."""


class ReadTimeoutError(TransportError):
    """A read passed its deadline; its destination stays quarantined until the transport ends it."""


class StaleRegionError(TransportError):
    """The peer deregistered the memory that was read: the bytes must not be used."""


class LeaseError(KVRDMAError):
    """A lease cannot be opened: every slot is taken, or the request is published already."""


class PullError(KVRDMAError):
    """Base of the reasons a pull fails for that are not those of a transport or control message."""


class LeaseRevokedError(PullError):
    """The producer ended the lease before the data had arrived; the bytes must not be used."""


class PullTimeoutError(PullError):
    """A pull passed its deadline."""


class PullAbortedError(PullError):
    """The caller aborted the pull, or closed the engine."""


class PeerUnavailableError(PullError):
    """The peer failed repeatedly and is left alone for a while: recompute instead."""


class ControlError(KVRDMAError):
    """Base of what can go wrong with a control message."""


class UnreachableError(ControlError):
    """Nobody answered at the control address within the deadline."""


class AuthenticationError(ControlError):
    """The other side holds a different shared secret, or one side has none."""


class ProtocolVersionError(ControlError):
    """The two sides speak different protocol versions; the message names both."""


class MessageError(ControlError, ValueError):
    """A control message is malformed, too large or of an unknown kind."""


class DataError(ControlError):
    """Bytes that arrived differ from the bytes the peer holds."""
