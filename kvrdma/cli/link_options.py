"""The options of `kvrdma link-test`, from text to what is measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from kvrdma.bench.choose import AUTO
from kvrdma.bench.link import LinkOptions
from kvrdma.bench.patterns import PATTERNS, Case, Shape
from kvrdma.config import Config
from kvrdma.errors import ConfigError
from kvrdma.models import DTYPE_BYTES, MODELS, KVShape, model_shape
from kvrdma.transport import Device, installed_transports

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_DEFAULT_ITERS = 7


class Size(click.ParamType[int]):
    """A number of bytes: ``4096``, ``32K``, ``32KiB``, ``1M``, ``2G`` (powers of 1024)."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read it; a usage error where that is impossible."""
        match = re.fullmatch(r"(\d+)\s*([kmg]?)(?:i?b)?", str(value).strip().lower())
        if not match or int(match[1]) == 0:
            self.fail(f"{value!r} is not a size such as 4096, 32K or 1MiB", param, ctx)
        return int(match[1]) * _UNITS[match[2]]


class Listed(click.ParamType[list[Any]]):
    """A comma-separated list of another type."""

    def __init__(self, item: click.ParamType[Any]) -> None:
        self._item = item
        self.name = f"{item.name},..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        """Read each item."""
        if isinstance(value, list):
            return value
        return [self._item.convert(item.strip(), param, ctx) for item in str(value).split(",")]


_CHOICE = click.Choice(PATTERNS)
_OPTIONS = (
    click.option("--transport", type=click.Choice([AUTO, *sorted(installed_transports())]), default=AUTO,
                 show_default=True, help="auto: the nearest that works, same-host before network."),
    click.option("--nbytes", type=Size(), default=str(64 << 20), show_default="64MiB", help="Of each read."),
    click.option("--block", type=Listed(Size()), default="4KiB,32KiB,1MiB", show_default=True,
                 help="Bytes of a block, a multiple of 8."),
    click.option("--pattern", type=Listed(_CHOICE), default=None, metavar="NAME,...",
                 show_default="all, or fragmented with a model",
                 help="contig: block i to block i. fragmented: random blocks of a pool twice as large on "
                 "both sides. remote_contig: remote blocks adjacent, local ones fragmented."),
    click.option("--iters", type=click.IntRange(1, 100_000), default=None, show_default="7, fewer if slow",
                 help="Measured reads of a case."),
    click.option("--model", default=None, metavar="NAME", help=f"KV-shaped blocks: {', '.join(MODELS)}."),
    click.option("--layers", type=click.IntRange(1, 10_000), help="Instead of --model."),
    click.option("--kv-heads", type=click.IntRange(1, 10_000), help="Of the whole model."),
    click.option("--head-dim", type=click.IntRange(1, 65_536), help="Elements of a head."),
    click.option("--dtype", type=click.Choice(list(DTYPE_BYTES)), help="Of the cache.  [default: bfloat16]"),
    click.option("--tp", type=click.IntRange(1, 1024), default=1, show_default=True, help="Ranks."),
    click.option("--tokens", type=click.IntRange(1, 10_000_000), default=8192, show_default=True,
                 help="Length of the request."),
    click.option("--block-tokens", type=click.IntRange(1, 65_536), default=16, show_default=True,
                 help="Tokens of a KV block."),
    click.option("--require-rdma", is_flag=True, help="Refuse reads that the peer's CPU would emulate."),
    click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda:N", help="Memory here."),
    click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object on stdout."),
)  # fmt: skip


def test_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a test to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Test:
    """What a command line asks for."""

    transport: str
    cases: tuple[Case, ...]
    options: LinkOptions
    as_json: bool
    request: str
    """For KV-shaped tests: ``"llama-3.1-8b tp 1: 8192 tokens"``, else empty."""


def read_options(values: Mapping[str, Any], config: Config) -> Test:
    """Turn parsed options into a test.

    Raises:
        ConfigError: they contradict each other, or a value is out of range.
    """
    kv, label = _kv_shape(values)
    if kv is None:
        shapes = [_plain_shape(values["nbytes"], block) for block in values["block"]]
        names = values["pattern"] or PATTERNS
    else:
        tokens, block_tokens, tp = values["tokens"], values["block_tokens"], values["tp"]
        shapes = [Shape(kv.layers, -(-tokens // block_tokens), kv.page_bytes(tp, block_tokens))]
        names = values["pattern"] or ("fragmented",)
        label = f"{label}, tp {tp}: {tokens} tokens"
    options = LinkOptions(
        device=Device.parse(values["device"]),
        require_one_sided=values["require_rdma"],
        iters=values["iters"] or _DEFAULT_ITERS,
        capped=values["iters"] is None,
        control_timeout_s=config.control_timeout_s,
        read_timeout_s=config.read_timeout_s,
    )
    cases = tuple(Case(name, shape) for name in names for shape in shapes)
    return Test(values["transport"], cases, options, values["as_json"], label if kv else "")


def _plain_shape(nbytes: int, block_bytes: int) -> Shape:
    if block_bytes > nbytes:
        raise ConfigError(f"--block {block_bytes} is larger than --nbytes {nbytes}")
    return Shape(1, nbytes // block_bytes, block_bytes)


def _kv_shape(values: Mapping[str, Any]) -> tuple[KVShape | None, str]:
    explicit = {key: values[key] for key in ("layers", "kv_heads", "head_dim", "dtype")}
    given = {key: value for key, value in explicit.items() if value is not None}
    if values["model"] is not None:
        known = model_shape(values["model"])
        fields = {name: getattr(known, name) for name in (*explicit, "mla")}
        return KVShape(**(fields | given)), values["model"]
    if not given:
        return None, ""
    missing = [f"--{key.replace('_', '-')}" for key in ("layers", "kv_heads", "head_dim") if key not in given]
    if missing:
        raise ConfigError(f"a KV shape also needs {' '.join(missing)}, or --model")
    return KVShape(**given), f"{given['layers']} layers of {given['kv_heads']} heads of {given['head_dim']}"
