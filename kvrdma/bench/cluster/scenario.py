"""What a multi-node benchmark does, as a TOML file says it."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import msgspec.inspect as types
import numpy as np

from kvrdma.errors import ConfigError
from kvrdma.models import DTYPE_BYTES, KVShape, model_shape, stages
from kvrdma.topology import EngineShape

Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engines of one side, all split alike."""

    engines: Positive = 1
    tp: Positive = 1
    dcp: Positive = 1
    """Decode context parallel, within tp."""
    pp: Positive = 1
    interleave: Positive = 1
    block: Positive = 16
    """Tokens of a block."""
    layout: Literal["HND", "NHD"] = "HND"

    @property
    def ranks(self) -> int:
        """Ranks of one engine."""
        return self.tp * self.pp


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that is not in the table."""

    layers: Positive
    kv_heads: Positive
    head_dim: Positive
    dtype: str = "bfloat16"
    mla: bool = False


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long prompts are, in tokens."""

    kind: Literal["fixed", "uniform", "lognormal"] = "fixed"
    tokens: Positive = 8192
    """The length, or the mean of ``lognormal``."""
    least: Positive = 1
    most: Positive = 131072
    sigma: Annotated[float, msgspec.Meta(gt=0, le=3)] = 0.5

    @property
    def longest(self) -> int:
        """Most tokens of a request."""
        return self.tokens if self.kind == "fixed" else self.most


class Arrival(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When requests come."""

    kind: Literal["closed", "poisson"] = "closed"
    concurrency: Positive = 4
    """Requests in flight per consumer engine: always (closed), or at most (poisson)."""
    rate: Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)] = 10.0
    """Requests a second, over all engines (poisson)."""


class Failures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of the requests that are made to fail."""

    withdraw: Share = 0.0
    """The producer takes the request back while it is read, and overwrites it."""
    abort: Share = 0.0
    """The consumer gives the pull up at once."""
    unreachable: Share = 0.0
    """The reference names a port at which nobody listens."""
    restart: bool = False
    """The first producer engine is closed in the middle, and opened anew."""


class Rivals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Interpreters of the environments that have the other libraries; empty: without."""

    nixl: str = ""
    mooncake: str = ""
    rounds: Positive = 5


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One benchmark."""

    model: str | Shape = "llama-3.1-8b"
    producer: Group = Group()
    consumer: Group = Group()
    requests: Positive = 64
    prompt: Prompt = Prompt()
    arrival: Arrival = Arrival()
    fragmentation: Share = 1.0
    """Share of the blocks that lie at random; 0: all consecutive."""
    failures: Failures = Failures()
    rivals: Rivals = Rivals()
    transports: tuple[str, ...] = ()
    """Empty: KVRDMA_TRANSPORTS, or all that work."""
    seed: int = 1
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 60.0
    """Of one pull; all waits of the benchmark derive from it."""
    verify: bool = True

    @property
    def kv(self) -> KVShape:
        """The model's cache.

        Raises:
            ConfigError: it is not in the table.
        """
        if isinstance(self.model, str):
            return model_shape(self.model, "give a table: model = { layers = ..., kv_heads = ..., head_dim = ... }")
        shape = self.model
        return KVShape(shape.layers, shape.kv_heads, shape.head_dim, shape.dtype, shape.mla)

    @property
    def world(self) -> int:
        """Processes of all engines."""
        return sum(group.engines * group.ranks for group in (self.producer, self.consumer))

    def engine_shape(self, group: Group) -> EngineShape:
        """Say how a group's engines are split.

        Raises:
            TopologyError: the sizes do not fit the model's heads.
        """
        kv = self.kv
        return EngineShape(
            tp_size=group.tp,
            num_kv_heads=kv.kv_heads,
            dcp_size=group.dcp,
            interleave=group.interleave,
            is_mla=kv.mla,
            stages=tuple(tuple(map(layer_name, part)) for part in stages(kv.layers, group.pp)) if group.pp > 1 else (),
        )

    def lengths(self) -> list[int]:
        """Draw the tokens of every request: the same on all ranks."""
        prompt, rng = self.prompt, np.random.default_rng(self.seed)
        if prompt.kind == "fixed":
            return [prompt.tokens] * self.requests
        if prompt.kind == "uniform":
            return [int(n) for n in rng.integers(prompt.least, prompt.most + 1, self.requests)]
        mean = np.log(prompt.tokens) - prompt.sigma**2 / 2
        drawn = rng.lognormal(mean, prompt.sigma, self.requests)
        return [int(n) for n in np.clip(np.round(drawn), prompt.least, prompt.most)]

    def arrivals_s(self) -> list[float]:
        """Draw when each request comes, in seconds from the start; all 0 in a closed loop."""
        if self.arrival.kind == "closed":
            return [0.0] * self.requests
        rng = np.random.default_rng(self.seed + 1)
        return [float(t) for t in np.cumsum(rng.exponential(1 / self.arrival.rate, self.requests))]

    def fates(self) -> list[str]:
        """Draw what is done to each request: ``""``, ``"withdraw"``, ``"abort"`` or ``"unreachable"``."""
        drawn = np.random.default_rng(self.seed + 2).random(self.requests)
        names = ("withdraw", "abort", "unreachable")
        limits = list(itertools.accumulate(float(getattr(self.failures, name)) for name in names))
        return [next((name for name, limit in zip(names, limits, strict=True) if x < limit), "") for x in drawn]


def layer_name(layer: int) -> str:
    """Name a layer as vLLM does."""
    return f"model.layers.{layer}.self_attn.attn"


def load_scenario(path: Path) -> Scenario:
    """Read a scenario file.

    Raises:
        ConfigError: it cannot be read, or names something unknown; says what.
    """
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"scenario {path}: {error}") from None
    return make_scenario(values, str(path))


def make_scenario(values: object, where: str) -> Scenario:
    """Check the values of a scenario.

    Raises:
        ConfigError: something is unknown, out of range, or does not fit together.
    """
    try:
        scenario = msgspec.convert(values, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigError(f"scenario {where}: {_explained(values, error)}") from None
    kv = scenario.kv
    for name, group in (("producer", scenario.producer), ("consumer", scenario.consumer)):
        if group.pp > kv.layers:
            raise ConfigError(f"scenario {where}: {name}.pp {group.pp} exceeds the model's {kv.layers} layers")
        if group.block % group.interleave:
            raise ConfigError(
                f"scenario {where}: {name}.interleave {group.interleave} does not divide its block of {group.block}"
            )
        scenario.engine_shape(group)
    prompt, failures = scenario.prompt, scenario.failures
    if prompt.least > prompt.most:
        raise ConfigError(f"scenario {where}: prompt.least {prompt.least} exceeds prompt.most {prompt.most}")
    shares = failures.withdraw + failures.abort + failures.unreachable
    if shares > 1:
        raise ConfigError(
            f"scenario {where}: failures.withdraw {failures.withdraw}, abort {failures.abort} and unreachable "
            f"{failures.unreachable} add up to {shares}: they are shares of the requests, use at most 1 in all"
        )
    if (kv.head_dim * DTYPE_BYTES[kv.dtype]) % 8:
        raise ConfigError(f"scenario {where}: head_dim {kv.head_dim} of {kv.dtype} is not a multiple of 8 bytes")
    return scenario


def _explained(values: Any, error: msgspec.ValidationError) -> str:  # noqa: ANN401 - as TOML has them
    """Say what msgspec found, with the value, and what there might be instead."""
    what, _, path = str(error).partition(" - at `$.")
    place = re.sub(r"[\[`].*", "", path)
    kind: types.Type = types.type_info(Scenario)
    for name in filter(None, place.split(".")):
        kind = next(field.type for field in _fields(kind) if field.name == name)
        values = values[name]
    if " field `" in what:
        return f"{place}{': ' if place else ''}{what}; known: {', '.join(field.name for field in _fields(kind))}"
    if isinstance(kind, types.LiteralType):
        return f"{place} {values!r} is unknown: use {' or '.join(map(str, kind.values))}"
    return f"{place} {values!r}: {what}"


def _fields(kind: types.Type) -> tuple[types.Field, ...]:
    kinds = kind.types if isinstance(kind, types.UnionType) else (kind,)
    return next((each.fields for each in kinds if isinstance(each, types.StructType)), ())
