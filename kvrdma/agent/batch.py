"""Batches as engines hand them over, read into prompts with their blocks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvrdma.errors import PlanError


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A batch to prefill: prompts one after another."""

    input_tokens: Any
    """``[tokens of the batch]`` integers: a tensor, an array or a list."""
    seq_lens: Sequence[int]
    """Tokens of each prompt."""
    slot_mapping: Any
    """``[tokens of the batch]`` integers: slot of each token, block * block_size + place in the block."""
    context_lens: Sequence[int] = ()
    """Tokens of each prompt that are in the caches already; empty: none."""
    salts: Sequence[bytes] = ()
    """What else the KV of each prompt depends on: an adapter, images, a tenant; empty: nothing."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One prompt of a batch."""

    tokens: npt.NDArray[np.int64]
    blocks: Sequence[int]
    start: int
    """Its first token's place in the batch."""
    salt: bytes = b""

    @property
    def end(self) -> int:
        """Its last token's place in the batch, and one."""
        return self.start + len(self.tokens)


def read_batch(model_input: Any, block_size: int) -> list[Piece]:  # noqa: ANN401 - duck-typed
    """Take a batch apart.

    Args:
        model_input: a ``ModelInput``, or anything with its first three attributes, of which the last two may be those
            of ``attn_metadata``.
        block_size: tokens of a block.

    Raises:
        PlanError: something is missing, the lengths do not add up, or slots are not those of whole blocks in order.
    """
    tokens = _integers("input_tokens", _attribute(model_input, "input_tokens"))
    slots = _integers("slot_mapping", _attribute(model_input, "slot_mapping"))
    lengths = _integers("seq_lens", _attribute(model_input, "seq_lens")).tolist()
    salts = _salts(model_input) or [b""] * len(lengths)
    if sum(lengths) != len(tokens) or len(tokens) != len(slots) or len(salts) != len(lengths):
        raise PlanError(
            f"a batch of {len(lengths)} prompts of {sum(lengths)} tokens in all has {len(tokens)} input_tokens, "
            f"{len(slots)} slots and {len(salts)} salts: slots are needed for every token of every prompt"
        )
    pieces, start = [], 0
    for number, (length, salt) in enumerate(zip(lengths, salts, strict=True)):
        if not isinstance(salt, bytes):
            raise PlanError(f"the salt of prompt {number} must be bytes, got {type(salt).__name__}")
        if length < 1:
            raise PlanError(f"prompt {number} of the batch has {length} tokens: at least 1 is needed")
        blocks = _blocks_of(slots[start : start + length], block_size, number)
        pieces.append(Piece(tokens[start : start + length], blocks, start, salt))
        start += length
    return pieces


def read_starts(model_input: Any, count: int) -> list[int]:  # noqa: ANN401 - duck-typed
    """Say how many tokens of each of ``count`` prompts are in the caches already.

    Raises:
        PlanError: ``context_lens`` are no lengths, or not one per prompt.
    """
    given = getattr(model_input, "context_lens", None)
    lengths = _integers("context_lens", () if given is None else given).tolist() or [0] * count
    if len(lengths) != count:
        raise PlanError(f"{len(lengths)} context_lens for {count} prompts: one is needed for each, or none at all")
    return lengths


def _attribute(model_input: Any, name: str) -> Any:  # noqa: ANN401
    for owner in (model_input, getattr(model_input, "attn_metadata", None)):
        value = getattr(owner, name, None)
        if value is not None:
            return value
    raise PlanError(f"a batch needs {name}: {type(model_input).__name__} has none; use kvrdma.agent.ModelInput")


def _salts(model_input: Any) -> list[bytes]:  # noqa: ANN401
    given = getattr(model_input, "salts", None)
    if given is None:
        return []
    if not isinstance(given, list | tuple):
        raise PlanError(f"salts must be a list of one bytes per prompt, got {given!r:.80}")
    return list(given)


def _integers(name: str, values: Any) -> npt.NDArray[np.int64]:  # noqa: ANN401 - tensor, array or list
    try:
        given = values.detach().cpu() if hasattr(values, "detach") else values
        array = np.asarray(given).reshape(-1)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged, sparse, or without memory
        raise PlanError(
            f"{name} must be integers: a list, an array or a dense tensor; got {type(values).__name__}: {error}"
        ) from None
    if array.size and array.dtype.kind not in "iu":
        raise PlanError(f"{name} must be integers, got {array.dtype}")
    return array.astype(np.int64)


def _blocks_of(slots: npt.NDArray[np.int64], block_size: int, number: int) -> list[int]:
    blocks = slots[::block_size] // block_size
    places = np.arange(len(slots))
    wanted = blocks[places // block_size] * block_size + places % block_size
    wrong = np.flatnonzero((slots != wanted) | (slots < 0))
    if len(wrong):
        place = int(wrong[0])
        raise PlanError(
            f"prompt {number}: token {place} is in slot {int(slots[place])}, slot {int(wanted[place])} follows from "
            f"blocks of {block_size} tokens: is that the block size of the caches?"
        )
    return [int(block) for block in blocks]
