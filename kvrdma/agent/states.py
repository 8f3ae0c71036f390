"""Hidden and intermediate states of a prompt: tensors to bytes and back, and their way through the stores.

The states of a prompt travel like KV: as pages of a cache of their own, 64 KiB each, named after the prompt.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvrdma.config import Config
from kvrdma.engine import Engine
from kvrdma.errors import MessageError, PlanError
from kvrdma.handshake import Identity
from kvrdma.page_format import LayerSpec
from kvrdma.store import Prompt, StorePort, Stores
from kvrdma.store.keys import PrefixKeys, derived_keys
from kvrdma.topology import EngineShape

PAGE_ROWS, PAGE_COLS = 64, 1024
PAGE_NBYTES = PAGE_ROWS * PAGE_COLS
_LENGTHS = struct.Struct("<QQ")
"""Of the header, and of everything."""
_PURPOSE = b"states"


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
        PlanError: something is no tensor, or its first axis is neither.
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


def _pack(named: Mapping[str, Any], single: bool, per_token: bool) -> bytes:  # noqa: FBT001 - private
    import torch

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    described = [(name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in plain.items()]
    header = msgspec.msgpack.encode(_Header(single, per_token, described))
    content = [each.view(-1).view(torch.uint8).numpy().tobytes() for each in plain.values()]
    total = _LENGTHS.size + len(header) + sum(map(len, content))
    return b"".join([_LENGTHS.pack(len(header), total), header, *content])


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
        length, _ = _LENGTHS.unpack_from(piece)
        offset = _LENGTHS.size + length
        header = msgspec.msgpack.decode(piece[_LENGTHS.size : offset], type=_Header)
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
        """Reserve ``nbytes``, in whole pages, at least one."""
        self._pages = max(1, nbytes // PAGE_NBYTES)
        self._pool = np.zeros((self._pages, PAGE_ROWS, PAGE_COLS), np.uint8)
        spec = LayerSpec((0, 1), 1, PAGE_ROWS, kind="mla", dims="BNC")
        identity = Identity(name, EngineShape(1, 1, is_mla=True), model={"kvrdma": "states 1"})
        self.engine = Engine({"states": self._pool}, spec, identity, config)
        self._port = StorePort(self.engine, stores, PAGE_ROWS)

    def put(self, pieces: Sequence[tuple[bytes, bytes]], timeout_s: float) -> list[bool]:
        """Offer ``(key of the prompt, bytes)`` each; what does not fit the pool is not offered."""
        prompts: list[Prompt] = []
        fits = []
        used = 0
        for parent, content in pieces:
            pages = -(-len(content) // PAGE_NBYTES)
            fits.append(used + pages <= self._pages)
            if fits[-1]:
                flat = self._pool[used : used + pages].reshape(-1)
                flat[: len(content)] = np.frombuffer(content, np.uint8)
                prompts.append(Prompt(self._keys(parent, pages), range(used, used + pages)))
                used += pages
        stored = iter(self._port.put(prompts, timeout_s))
        return [fit and next(stored) for fit in fits]

    def get(self, parent: bytes, timeout_s: float) -> bytes | None:
        """Fetch the bytes of the prompt with that key; None where they are not there as a whole."""
        prompt = Prompt(self._keys(parent, self._pages), range(self._pages))
        (tokens,) = self._port.get([prompt], timeout_s)
        content = self._pool.reshape(-1)[: tokens * PAGE_COLS].tobytes()
        nbytes = _LENGTHS.unpack_from(content)[1] if content else 0
        return content[:nbytes] if 0 < nbytes <= len(content) else None

    def _keys(self, parent: bytes, pages: int) -> PrefixKeys:
        keys = derived_keys(self._port.fingerprint + parent, _PURPOSE, pages)
        return PrefixKeys(keys, pages * PAGE_ROWS, PAGE_ROWS)

    def close(self) -> None:
        """Close its engine. Idempotent."""
        self.engine.close()
