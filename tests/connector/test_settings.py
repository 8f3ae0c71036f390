"""What is refused at start-up, and how settings reach the engine."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.needs("torch")]


def make(model: str, role: str = "kv_both", shape: dict[str, Any] | None = None, **extra: Any) -> Any:  # noqa: ANN401
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.helpers.mini_engine import Shape, make_config

        return make_config(model, "e", role, Shape(**shape or {}), "fail", extra)


def start(config: Any, role: str = "SCHEDULER") -> Any:  # noqa: ANN401
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvrdma.connector import KvRdmaConnector
    from tests.helpers.mini_engine import Shape, make_kv_config

    return KvRdmaConnector(config, KVConnectorRole[role], make_kv_config(Shape()))


def test_extra_config_wins_over_the_environment() -> None:
    from kvrdma.connector.options import ConnectorOptions

    environ = {"KVRDMA_LEASE_S": "10", "KVRDMA_FENCE_SLOTS": "7", "KVRDMA_TRANSPORTS": "ucx"}
    extra = {"kv_lease_duration": 45, "transports": ["cma", "ucx"], "require_one_sided": True,
             "bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 100}  # fmt: skip
    options = ConnectorOptions.read(extra, environ)
    config = options.config
    assert (config.lease_s, config.fence_slots, config.transports) == (45.0, 7, ("cma", "ucx"))
    assert config.require_one_sided
    assert (options.bidirectional, options.decoder_lease_s, options.recompute_threshold) == (True, 100.0, 64)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"lease": 3}, r"unknown \['lease'\]; known: .*lease_s"),
        ({"secret": "0123456789abcdef"}, "unknown"),
        ({"lease_s": "soon"}, "^kv_connector_extra_config: lease_s: 'soon' is not a number of seconds"),
        ({"kv_lease_duration": -1}, r"^kv_connector_extra_config: kv_lease_duration: -1\.0 is not a number of seconds"),
        ({"bind": 5600}, "^kv_connector_extra_config: bind: '5600' is not HOST:PORT"),
        ({"fence_slots": 64.7}, r"^kv_connector_extra_config: fence_slots: '64\.7' is not a whole number"),
        ({"lease_s": 45, "kv_lease_duration": 30}, "lease_s=45 and kv_lease_duration=30 are two names of one setting"),
        ({"engine_ttl": 9, "peer_idle_s": ""}, "engine_ttl=9 and peer_idle_s='' are two names of one setting"),
        ({"kv_recompute_threshold": 64.7}, r"kv_recompute_threshold=64\.7 is not a whole number"),
        ({"bidirectional_kv_xfer": "yes"}, "bidirectional_kv_xfer='yes' is not true or false"),
        ({"kv_recompute_threshold": -1}, "kv_recompute_threshold=-1 is not a number from 0"),
        ({"kv_recompute_threshold": float("nan")}, "kv_recompute_threshold=nan is not a number from 0"),
        ({"kv_recompute_threshold": float("inf")}, "kv_recompute_threshold=inf is not a number from 0"),
        ({"decoder_kv_blocks_ttl": float("nan")}, "decoder_kv_blocks_ttl=nan is not a number from 0"),
    ],
)
def test_a_wrong_setting_is_named(extra: dict[str, Any], message: str) -> None:
    from kvrdma.connector.options import ConnectorOptions
    from kvrdma.errors import ConfigError

    with pytest.raises(ConfigError, match=message):
        ConnectorOptions.read(extra, {})


def test_what_extra_config_may_hold() -> None:
    from kvrdma.connector.options import ConnectorOptions

    environ = {"KVRDMA_LEASE_S": "never", "KVRDMA_ALLOW_PEERS": "10.0.0.1", "KVRDMA_PEER_IDLE_S": "9"}
    extra = {
        "lease_s": 45,
        "kv_lease_duration": "45.0",
        "allow_peers": [],
        "advertise": None,
        "kv_recompute_threshold": 64.0,
    }
    options = ConnectorOptions.read(extra, environ)
    assert (options.config.lease_s, options.config.peer_idle_s, options.recompute_threshold) == (45, 9, 64)
    assert (options.config.allow_peers, options.config.advertise) == ((), None), "emptiness asks for the default"


def test_a_variable_is_named_where_it_was_set() -> None:
    from kvrdma.connector.options import ConnectorOptions
    from kvrdma.errors import ConfigError

    with pytest.raises(ConfigError, match=r"^KVRDMA_LEASE_S: 'never' is not"):
        ConnectorOptions.read({"fence_slots": 5}, {"KVRDMA_LEASE_S": "never"})


def test_data_parallel_ranks_listen_side_by_side() -> None:
    from kvrdma.connector.options import ConnectorOptions
    from kvrdma.errors import ConfigError

    options = ConnectorOptions.read({"bind": "[::1]:5600"}, {})
    assert [str(options.scheduler_bind(rank)) for rank in (0, 3)] == ["[::1]:5600", "[::1]:5603"]
    assert options.worker_bind() == "[::1]:0"
    with pytest.raises(ConfigError, match="no port is left for data-parallel rank 7"):
        ConnectorOptions.read({"bind": "[::1]:65530"}, {}).scheduler_bind(7)
    assert ConnectorOptions.read({}, {}).scheduler_bind(3).port == 0


def test_what_cannot_work_is_refused_at_start(tiny_llama: str) -> None:
    from kvrdma.errors import ConfigError, TopologyError

    config = make(tiny_llama)
    config.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(ConfigError, match="prefill context parallel: set prefill_context_parallel_size=1"):
        start(config)
    config = make(tiny_llama)
    config.kv_transfer_config.enable_permute_local_kv = True
    with pytest.raises(ConfigError, match="enable_permute_local_kv: kvrdma converts layouts by itself"):
        start(config)
    config = make(tiny_llama)
    config.kv_transfer_config.kv_buffer_device = "tpu"
    with pytest.raises(ConfigError, match="kv_buffer_device=tpu"):
        start(config)
    config = make(tiny_llama)
    config.parallel_config.tensor_parallel_size = 3
    with pytest.raises(TopologyError, match="4 kv heads, 3 parts"):
        start(config)


def test_no_open_door_without_a_secret(tiny_llama: str) -> None:
    from kvrdma.errors import ConfigError

    with pytest.raises(ConfigError, match="can be reached from other hosts: set KVRDMA_SECRET"):
        start(make(tiny_llama, bind="0.0.0.0:0", advertise="10.0.0.1"))
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:0 is no address that others can reach"):
        start(make(tiny_llama, bind="0.0.0.0:0"))


def test_a_consumer_does_not_listen(tiny_llama: str) -> None:
    connector = start(make(tiny_llama, role="kv_consumer", bind="0.0.0.0:0"))
    assert connector.scheduler._server is None


def test_what_vllm_asks_the_class(tiny_llama: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvrdma.connector import KvRdmaConnector

    config = make(tiny_llama)
    assert KVConnectorFactory.supports_hma_config(config.kv_transfer_config)
    assert KvRdmaConnector.get_required_kvcache_layout(config) == "LBHNC"
    assert KvRdmaConnector.supports_sleep_mode(config.kv_transfer_config)
    connector = start(config)
    assert connector.get_loaded_kv_cache_group_ids(None) == (0,)
    assert connector.supports_divergent_local_hybrid_hits
    connector.shutdown()
    connector.shutdown()


@pytest.mark.parametrize(
    ("isa", "message"),
    [("amx", "packs its pages for 'amx' here"), ("neon", "packs its pages for 'neon'")],
)
def test_pages_packed_for_other_cpus_are_refused(monkeypatch: pytest.MonkeyPatch, isa: str, message: str) -> None:
    import torch
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvrdma.connector.layouts import layer_spec
    from kvrdma.errors import LayoutError
    from kvrdma.topology import EngineShape

    class Layer:
        @staticmethod
        def get_attn_backend() -> Any:  # noqa: ANN401
            return cpu_attn.CPUAttentionBackend

    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    where = (EngineShape(2, 4), 1, 0)
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "vec")
    found = layer_spec("l", spec, Layer(), where)
    assert (found.kind, found.heads, found.total_heads, found.dtype) == ("cpu", (2, 4), 4, "bfloat16")
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: isa)
    with pytest.raises(LayoutError, match=message):
        layer_spec("l", spec, Layer(), where)


def test_other_specs() -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

    from kvrdma.connector.layouts import layer_spec
    from kvrdma.errors import LayoutError
    from kvrdma.topology import EngineShape

    where = (EngineShape(4, 4), 3, 2)
    state = layer_spec("s", MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,)), None, where)
    assert (state.kind, state.heads, state.total_heads, state.block_size, state.group) == ("state", (3, 4), 4, 1, 2)
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    mla = layer_spec("m", latent, None, where)
    assert (mla.kind, mla.heads, mla.total_heads, mla.block_size, mla.dtype) == ("mla", (0, 1), 1, 16, "bfloat16")
    common = {"block_size": 16, "head_size": 64, "dtype": torch.float32}
    with pytest.raises(LayoutError, match=r"layer d: 2 kv heads in 2 slots on this rank.*over 4 parts make 1"):
        layer_spec("d", FullAttentionSpec(num_kv_heads=2, **common), None, where)
    with pytest.raises(LayoutError, match="4 tokens per state"):
        layer_spec("c", FullAttentionSpec(num_kv_heads=1, tokens_per_state=4, **common), None, where)


def test_importing_the_connector_starts_nothing() -> None:
    """vLLM imports it in the API server: no thread, no transport, no CUDA."""
    import subprocess
    import sys

    code = (
        "import os, sys, threading, vllm.config\n"
        "import vllm.distributed.kv_transfer.kv_connector.v1.base\n"
        "before, env = threading.active_count(), dict(os.environ)\n"
        "import kvrdma.connector\n"
        "assert threading.active_count() == before and dict(os.environ) == env\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'kvrdma_cma', 'kvrdma_ucx', 'kvrdma_memory', 'cupy', 'nixl'}, loaded\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
