"""``KVTransferAgent``: the one object an engine's worker needs to send and receive KV."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from kvrdma.agent.config import AgentConfig
from kvrdma.agent.factory import Given, States, create_connector
from kvrdma.errors import ConfigError


class KVTransferAgent:
    """Sends what a prefill has computed, and receives it where that has been done already. For one thread.

    Two uses: disaggregated prefill (one engine sends, another receives), and a remote KV store (an engine sends, and
    whoever has a prompt with the same beginning receives, also after the sender has gone).
    """

    def __init__(self, rank: int, local_rank: int, config: AgentConfig) -> None:
        """Make the connector that ``config`` names.

        Args:
            rank: of this worker in its engine, see ``CacheFacts.tp_size``.
            local_rank: of this worker on its host.
            config: its ``kv_transfer_config`` has to be set.

        Raises:
            ConfigError: (a ``ValueError``) there is no transfer configuration, it transfers nothing, or the connector
                cannot be made from it.
        """
        transfer = config.kv_transfer_config
        if transfer is None:
            raise ConfigError("kv_transfer_config is not set: a KVTransferAgent needs one")
        if not transfer.is_kv_transfer_instance:
            raise ConfigError(
                f"this is no KV transfer instance: kv_connector {transfer.kv_connector!r}, kv_role "
                f"{transfer.kv_role!r}; the role has to be kv_producer, kv_consumer or kv_both"
            )
        self.config = config
        self.connector = create_connector(rank, local_rank, config)

    def send_kv_caches_and_hidden_states(
        self,
        model_executable: Given,
        model_input: Given,
        kv_caches: Given,
        hidden_or_intermediate_states: States,
    ) -> None:
        """Offer the KV of a prefilled batch and the states it ended with. Its blocks are the caller's again on return.

        Args:
            model_executable: the model.
            model_input: the batch: tokens, lengths and slots, see ``ModelInput``.
            kv_caches: one cache per layer, by name or in order; the same ones in every call.
            hidden_or_intermediate_states: ``[tokens of the batch, hidden]`` or ``[prompts, hidden]``, or a mapping (or
                an object with ``tensors``) of such; None where nobody will need them.

        Raises:
            PlanError: the slots are no blocks of the caches.
            ConfigError: this engine does not send.
        """
        self.connector.send_kv_caches_and_hidden_states(
            model_executable, model_input, kv_caches, hidden_or_intermediate_states
        )

    def recv_kv_caches_and_hidden_states(
        self,
        model_executable: Given,
        model_input: Given,
        kv_caches: Given,
    ) -> tuple[States | None, bool, Any]:
        """Fetch the KV of a batch into its blocks.

        Returns:
            The states as they were sent (or None), whether the model need not run, and the batch. The model need not
            run if every token of the batch and all states have arrived. Otherwise a ``ModelInput`` comes back with
            ``context_lens``: how many tokens of each prompt are in place. A caller that computes all of them again
            gets the same result.

        Raises:
            PlanError, ConfigError: as ``send_kv_caches_and_hidden_states``.
            PullError: blocks may still be written by a transport that has failed: they must not be used.
        """
        return self.connector.recv_kv_caches_and_hidden_states(model_executable, model_input, kv_caches)

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        self.connector.close()

    def __enter__(self) -> Self:
        """Use as a context manager: closed at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()
