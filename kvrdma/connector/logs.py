"""Where kvrdma's log goes in a vLLM process: where vLLM's own goes, unless somebody has set it up already.

vLLM sets up the logger ``vllm`` alone. Without this, what kvrdma says at INFO, such as by which way a peer is read,
would be dropped, and its warnings would come without time and process.
"""

from __future__ import annotations

import logging

OURS = ("kvrdma", "kvrdma_ucx")


def join_logs(names: tuple[str, ...] = OURS, theirs: str = "vllm") -> None:
    """Give each logger the handlers and the level of vLLM's. Idempotent.

    One that has handlers or a level of its own, or a root logger with handlers above it, is left alone; without
    handlers of vLLM's (``VLLM_CONFIGURE_LOGGING=0``) nothing is changed.
    """
    model = logging.getLogger(theirs)
    for name in names:
        logger = logging.getLogger(name)
        if not model.handlers or logger.hasHandlers() or logger.level != logging.NOTSET:
            continue
        for each in model.handlers:
            logger.addHandler(each)
        logger.setLevel(model.level)
        logger.propagate = False
