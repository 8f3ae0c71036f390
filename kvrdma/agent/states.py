"""Hidden and intermediate states of a prompt: tensors to bytes and back, and their way through the stores.

The states of a prompt travel like KV: as pages of a cache of their own, 64 KiB each. Two senders may compute other
bits for the same prompt, and a store may have given up any page. So only the first page, the head, is named after the
prompt; it holds the BLAKE3 digest of the whole, after which the other pages are named. Whoever gets something gets all
bytes of one version, or nothing; senders of equal bits share pages.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvrdma.config import Config
from kvrdma.engine import Engine
from kvrdma.errors import ConfigError, MessageError, PlanError
from kvrdma.handshake import Identity
from kvrdma.page_format import LayerSpec
from kvrdma.store import Prompt, StorePort, Stores
from kvrdma.store.keys import KEY_NBYTES, MAX_BLOCKS, PrefixKeys, derived_keys, new_hasher
from kvrdma.topology import EngineShape

PAGE_ROWS, PAGE_COLS = 64, 1024
PAGE_NBYTES = PAGE_ROWS * PAGE_COLS
_LENGTH = struct.Struct("<Q")
"""Of the header."""
_HEAD = struct.Struct(f"<Q{KEY_NBYTES}s")
"""In front of a version: how many bytes follow, and their digest."""
_PLACES = 4
"""For heads of a prompt: the first is taken again only after its head has gone, also if pages of that version have."""


@dataclass(frozen=True, slots=True)
class IntermediateTensors:
    """What a pipeline stage hands to the next one, by name."""

    tensors: Mapping[str, Any]


class _Header(msgspec.Struct):
    single: bool
    """A tensor, not a mapping of them."""
    per_token: bool
    tensors: list[tuple[str, str, tuple[int, ...]]]
    """Name, dtype, shape; their bytes follow in this order."""

    @property
    def kind(self) -> str:
        """What the sender gave."""
        given = "a tensor" if self.single else "tensors by name"
        return f"{given} of a row per {'token' if self.per_token else 'prompt'}"


def slice_states(states: Any, spans: Sequence[tuple[int, int]]) -> list[bytes]:  # noqa: ANN401 - torch
    """Cut the states of a batch into one piece of bytes per prompt.

    Args:
        states: a tensor, a mapping of tensors, or an object with such ``tensors``; the first axis of each counts the
            batch's tokens, or its prompts.
        spans: where in the batch the tokens of each prompt are.

    Raises:
        PlanError: something is no tensor, holds no numbers of its own, or its first axis is neither.
    """
    single = not isinstance(states, Mapping) and not hasattr(states, "tensors")
    named: Mapping[str, Any] = {"": states} if single else getattr(states, "tensors", states)
    _check_tensors(named)
    total = spans[-1][1] if spans else 0
    counts = {int(tensor.shape[0]) for tensor in named.values()}
    if counts not in ({total}, {len(spans)}):
        raise PlanError(
            f"states of {sorted(counts)} rows for a batch of {len(spans)} prompts of {total} tokens in all: need one "
            "row per token, or one per prompt"
        )
    per_token = counts == {total}
    rows = spans if per_token else [(number, number + 1) for number in range(len(spans))]
    return [_pack({name: each[lo:hi] for name, each in named.items()}, single, per_token) for lo, hi in rows]


def _check_tensors(named: object) -> None:
    import torch

    found = list(named.values()) if isinstance(named, Mapping) else [named]
    strange = [each for each in found if not isinstance(each, torch.Tensor) or not each.dim()]
    if strange:
        raise PlanError(
            "states must be torch tensors of one row per token or per prompt, or a mapping of such; got "
            f"{type(strange[0]).__name__} of shape {tuple(getattr(strange[0], 'shape', ()))}"
        )
    for name, each in named.items() if isinstance(named, Mapping) else ():
        if not isinstance(name, str):
            raise PlanError(f"states must be named by texts, got {name!r:.80}")
        if each.layout != torch.strided or each.is_meta or each.is_quantized:
            raise PlanError(
                f"states {name!r} must be dense tensors with memory, not quantized; got layout {each.layout}, dtype "
                f"{each.dtype}, on {each.device}"
            )


def _pack(named: Mapping[str, Any], single: bool, per_token: bool) -> bytes:  # noqa: FBT001 - private
    import torch

    plain = {name: tensor.detach().resolve_conj().resolve_neg().cpu().contiguous() for name, tensor in named.items()}
    described = [(name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in plain.items()]
    header = msgspec.msgpack.encode(_Header(single, per_token, described))
    content = [each.view(-1).view(torch.uint8).numpy().tobytes() for each in plain.values()]
    return b"".join([_LENGTH.pack(len(header)), header, *content])


def join_states(pieces: Sequence[bytes], device: Any) -> Any:  # noqa: ANN401 - torch
    """Put the states of a batch's prompts together again.

    Returns:
        A tensor, or ``IntermediateTensors``, on ``device``.

    Raises:
        MessageError: a piece is damaged, or they do not fit one another.
    """
    import torch

    opened = [_unpack(piece) for piece in pieces]
    first = opened[0][0]
    names = [name for name, _, _ in first.tensors]
    _check_alike("are of different kinds", [header.kind for header, _ in opened])
    _check_alike("have different names", [str(list(tensors)) for _, tensors in opened])
    for name in names:
        kinds = [f"{tensors[name].dtype} {[*tensors[name].shape[1:]]} a row" for _, tensors in opened]
        _check_alike(f"differ in {name!r}" if name else "differ", kinds)
    joined = {name: torch.cat([tensors[name] for _, tensors in opened]).to(device) for name in names}
    return joined[""] if first.single else IntermediateTensors(joined)


def _check_alike(how: str, kinds: Sequence[str]) -> None:
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise MessageError(
                f"the states of the batch's prompts {how}: prompt 0 {kinds[0]}, prompt {number} {kind}; put prompts "
                "into one batch whose senders gave states of one kind"
            )


def _unpack(piece: bytes) -> tuple[_Header, dict[str, Any]]:
    import torch

    try:
        (length,) = _LENGTH.unpack_from(piece)
        offset = _LENGTH.size + length
        header = msgspec.msgpack.decode(piece[_LENGTH.size : offset], type=_Header)
        tensors = {}
        for name, dtype, shape in header.tensors:
            kind = getattr(torch, dtype, None)
            if not isinstance(kind, torch.dtype):
                raise MessageError(f"states of dtype {dtype!r}: torch has none of that name")
            if not shape:
                raise MessageError(f"states {name!r} have no rows")
            count = int(np.prod(shape, dtype=np.int64))
            if count:
                content = bytearray(piece[offset : offset + count * kind.itemsize])
                tensors[name] = torch.frombuffer(content, dtype=kind).reshape(shape)
            else:
                tensors[name] = torch.empty(shape, dtype=kind)
            offset += count * kind.itemsize
    except (struct.error, msgspec.DecodeError, ValueError, RuntimeError) as error:
        raise MessageError(f"states cannot be read: {error}") from None
    return header, tensors


class StatesPort:
    """Puts pieces of bytes into stores and gets them out, through a pool of pages. For one thread."""

    def __init__(self, stores: Stores, config: Config, nbytes: int, name: str) -> None:
        """Reserve ``nbytes``, in whole pages, at least one.

        Raises:
            ConfigError: there is not as much memory.
        """
        self._pages = max(1, nbytes // PAGE_NBYTES)
        try:
            self._pool = np.zeros((self._pages, PAGE_ROWS, PAGE_COLS), np.uint8)
        except (MemoryError, ValueError) as error:
            raise ConfigError(f"states_bytes={nbytes} does not fit into memory: {error}; give fewer") from None
        spec = LayerSpec((0, 1), 1, PAGE_ROWS, kind="mla", dims="BNC")
        identity = Identity(name, EngineShape(1, 1, is_mla=True), model={"kvrdma": "states 2"})
        self.engine = Engine({"states": self._pool}, spec, identity, config)
        self._port = StorePort(self.engine, stores, PAGE_ROWS)

    def put(self, pieces: Sequence[tuple[bytes, bytes]], timeout_s: float) -> list[bool]:
        """Offer ``(key of the prompt, bytes)`` each, unless a version is there already.

        Returns:
            For each whether the stores have a version; what does not fit the pool is not offered.
        """
        deadline_s = time.monotonic() + timeout_s
        places = [self._place(parent, deadline_s) for parent, _ in pieces]  # before the pool is filled
        prompts: list[Prompt] = []
        offers: list[list[int]] = []
        used = 0
        for (head, _), (_, content) in zip(places, pieces, strict=True):
            pages = _pages_of(len(content))
            offers.append([])
            if head is None or used + pages > self._pages:
                continue
            for offer in self._write(head, content, range(used, used + pages)):
                offers[-1].append(len(prompts))
                prompts.append(offer)
            used += pages
        stored = self._port.put(prompts, _left_s(deadline_s))
        return [
            there or (bool(own) and all(stored[number] for number in own))
            for (_, there), own in zip(places, offers, strict=True)
        ]

    def _write(self, head: PrefixKeys, content: bytes, pages: range) -> Iterator[Prompt]:
        """Put a version into pages of the pool; gives what to offer.

        The head first: a store gives up what was used longest ago, and a head that has gone leaves its place to another
        version, while one that stays without its pages takes it up.
        """
        digest = new_hasher()(content).digest()
        whole = _HEAD.pack(len(content), digest) + content
        self._pool[pages.start : pages.stop].reshape(-1)[: len(whole)] = np.frombuffer(whole, np.uint8)
        yield Prompt(head, pages[:1])
        if len(pages) > 1:
            yield Prompt(self._others(digest, len(pages)), pages[1:])

    def get(self, parent: bytes, timeout_s: float) -> bytes | None:
        """Fetch the bytes of the prompt with that key; None where no version is there as a whole."""
        deadline_s = time.monotonic() + timeout_s
        for head in self._heads(parent):
            found = self._version(head, deadline_s)
            if found is None:
                return None
            nbytes, digest = found
            pages = _pages_of(nbytes)
            if pages <= self._pages and self._fetch(self._others(digest, pages), range(1, pages), deadline_s):
                return self._pool.reshape(-1)[_HEAD.size : _HEAD.size + nbytes].tobytes()
        return None

    def _place(self, parent: bytes, deadline_s: float) -> tuple[PrefixKeys | None, bool]:
        """Find a place for the head of a prompt, if there is one; says whether a version is there as a whole."""
        for head in self._heads(parent):
            found = self._version(head, deadline_s)
            if found is None:
                return head, False
            pages = _pages_of(found[0])
            if pages <= MAX_BLOCKS:  # else it is none of ours
                others = self._others(found[1], pages)
                if pages == 1 or self._port.look([others], _left_s(deadline_s)) == [others.num_tokens]:
                    return None, True
        return None, False

    def _version(self, head: PrefixKeys, deadline_s: float) -> tuple[int, bytes] | None:
        """Fetch a head into the first page of the pool; gives what it says of its version."""
        if not self._fetch(head, range(1), deadline_s):
            return None
        nbytes, digest = _HEAD.unpack_from(self._pool[0])
        return nbytes, digest

    def _fetch(self, keys: PrefixKeys, pages: range, deadline_s: float) -> bool:
        """Fetch pages; says whether all of them came."""
        return not pages or self._port.get([Prompt(keys, pages)], _left_s(deadline_s)) == [keys.num_tokens]

    def _heads(self, parent: bytes) -> list[PrefixKeys]:
        keys = derived_keys(self._port.fingerprint + parent, b"states", _PLACES)
        return [PrefixKeys((key,), PAGE_ROWS, PAGE_ROWS) for key in keys]

    def _others(self, digest: bytes, pages: int) -> PrefixKeys:
        """Name the pages of a version after its head."""
        keys = derived_keys(self._port.fingerprint + digest, b"pages of states", pages - 1)
        return PrefixKeys(keys, (pages - 1) * PAGE_ROWS, PAGE_ROWS)

    def close(self) -> None:
        """Close its engine. Idempotent."""
        self.engine.close()


def _pages_of(nbytes: int) -> int:
    return -(-(_HEAD.size + nbytes) // PAGE_NBYTES)


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
