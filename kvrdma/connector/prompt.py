"""A digest of what KV depends on, so that no request is served from another prompt's cache."""

from __future__ import annotations

import hashlib
from array import array
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

_DIGEST_BYTES = 16


def prompt_digest(request: Request, num_tokens: int) -> str | None:
    """Digest the first ``num_tokens`` tokens of a request, its pictures among them and its adapter.

    Returns:
        Hex digits; None where a request has embeddings instead of tokens, or fewer tokens.
    """
    tokens: Any = request.all_token_ids
    if request.prompt_token_ids is None or len(tokens) < num_tokens:
        return None
    digest = hashlib.blake2b(array("q", islice(tokens, num_tokens)).tobytes(), digest_size=_DIGEST_BYTES)
    for feature in getattr(request, "mm_features", None) or ():
        offset = int(feature.mm_position.offset)
        if offset < num_tokens:
            digest.update(f"\0{offset}:{feature.identifier}".encode())
    adapter = getattr(request, "lora_request", None)
    if adapter is not None:
        digest.update(f"\0lora:{adapter.lora_name}".encode())
    return digest.hexdigest()
