"""The options of `kvrdma link-test`, from text to what is measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import click

from kvrdma.bench.choose import AUTO
from kvrdma.bench.link import LinkOptions
from kvrdma.bench.link_peer import MAX_POOL_NBYTES
from kvrdma.bench.patterns import PATTERNS, POOL_RATIO, Case, Shape
from kvrdma.cli.link_more import More, more_options, read_more
from kvrdma.config import Config
from kvrdma.errors import ConfigError
from kvrdma.models import DTYPE_BYTES, MODELS, KVShape, model_shape
from kvrdma.transport import Device, installed_transports

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DEFAULT_ITERS = 7
_MAX_NBYTES = MAX_POOL_NBYTES // POOL_RATIO
_PLAIN = ("nbytes", "block")
_SHAPED = ("layers", "kv_heads", "head_dim", "dtype", "tp", "tokens", "block_tokens")


class Size(click.ParamType[int]):
    """A number of bytes from 8 on (at most 128 GiB): ``4096``, ``32K``, ``32KiB``, ``1M``, ``2G``; powers of 1024."""

    name = "size"

    def __init__(self, multiple_of: int = 1, most: int = _MAX_NBYTES) -> None:
        self._multiple_of = multiple_of
        self._most = most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read it; a usage error where that is impossible."""
        match = re.fullmatch(r"(\d+)\s*([kmgt]?)(?:i?b)?", str(value).strip().lower())
        if not match:
            self.fail(f"{value!r} is not a size such as 4096, 32K or 1MiB", param, ctx)
        nbytes = int(match[1]) * _UNITS[match[2]]
        if not 8 <= nbytes <= self._most:
            self.fail(f"{value!r} is outside 8 bytes to {self._most >> 30} GiB", param, ctx)
        if nbytes % self._multiple_of:
            self.fail(f"{value!r} is not a multiple of {self._multiple_of}", param, ctx)
        return nbytes


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
                 show_default=True, help="auto: the nearest that works, same-host before network; memory reads this "
                 "process itself; of KVRDMA_TRANSPORTS, where that is set, the first that works."),
    click.option("--nbytes", type=Size(), default="64MiB", show_default=True,
                 help="Of each read; K, M, G (or KB, KiB ...) are powers of 1024. Each side holds twice as much."),
    click.option("--block", type=Listed(Size(multiple_of=8)), default="4KiB,32KiB,1MiB", show_default=True,
                 help="Bytes of a block, a multiple of 8."),
    click.option("--pattern", type=Listed(_CHOICE), default=None, metavar="NAME,...",
                 help="contig: block i to block i. fragmented: random blocks of a pool twice as large on "
                 "both sides. remote_contig: remote blocks adjacent, local ones fragmented. Unless given: all, "
                 "or fragmented with a KV shape."),
    click.option("--iters", type=click.IntRange(1, 100_000), default=None,
                 help=f"Measured reads of a case. Unless given: {_DEFAULT_ITERS}, fewer (at least 3) where the test "
                 "would take longer than 10 s."),
    click.option("--model", default=None, metavar="NAME", help=f"KV-shaped blocks: {', '.join(MODELS)}."),
    click.option("--layers", type=click.IntRange(1, 10_000), help="With --kv-heads, --head-dim; not --model."),
    click.option("--kv-heads", type=click.IntRange(1, 10_000), help="Of the whole model."),
    click.option("--head-dim", type=click.IntRange(1, 65_536), help="Elements of a head."),
    click.option("--dtype", type=click.Choice(list(DTYPE_BYTES)), help="Of the cache; bfloat16 unless given."),
    click.option("--tp", type=click.IntRange(1, 1024), default=1, show_default=True, help="Ranks, with a KV shape."),
    click.option("--tokens", type=click.IntRange(1, 10_000_000), default=8192, show_default=True,
                 help="Length of the request, with a KV shape."),
    click.option("--block-tokens", type=click.IntRange(1, 65_536), default=16, show_default=True,
                 help="Tokens of a KV block, with a KV shape."),
    click.option("--require-rdma", "--require-one-sided", is_flag=True,
                 help="Refuse reads that the peer's CPU would emulate. RDMA is one-sided, and so is reading another "
                 "process of this host through the kernel. Also where KVRDMA_REQUIRE_ONE_SIDED=1."),
    click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda:N", help="Memory here."),
    click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object on stdout."),
)  # fmt: skip


def test_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a test to a command."""
    command = more_options(command)
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
    more: More = field(default_factory=More)
    listed: tuple[str, ...] = ()
    """What ``auto`` chooses from, best first; empty: all."""


def read_options(values: Mapping[str, Any], config: Config, given: Collection[str] = ()) -> Test:
    """Turn parsed options into a test.

    Args:
        values: every option.
        config: deadlines, and what holds where ``--transport`` or ``--require-rdma`` is not typed.
        given: names of those that were typed: none may be without effect.

    Raises:
        ConfigError: they contradict each other, or a value is out of range.
    """
    kv, label = _kv_shape(values)
    _refuse_unused(given, shaped=kv is not None)
    listed = () if "transport" in given else _known(config.transports)
    if kv is None:
        shapes = [_plain_shape(values["nbytes"], block) for block in values["block"]]
        names = values["pattern"] or PATTERNS
    else:
        tokens, block_tokens, tp = values["tokens"], values["block_tokens"], values["tp"]
        shapes = [Shape(kv.layers, -(-tokens // block_tokens), kv.page_bytes(tp, block_tokens))]
        if shapes[0].nbytes > _MAX_NBYTES:
            size = f"{shapes[0].nbytes / (1 << 30):.1f} GiB"
            raise ConfigError(f"a request of {size} is more than {_MAX_NBYTES >> 30} GiB: give fewer --tokens")
        names = values["pattern"] or ("fragmented",)
        label = f"{label}, tp {tp}: {tokens} tokens"
    budget = {} if values["iters"] is None else {"budget_s": None}
    options = LinkOptions(
        device=Device.parse(values["device"]),
        require_one_sided=values["require_rdma"] or config.require_one_sided,
        iters=values["iters"] or _DEFAULT_ITERS,
        control_timeout_s=config.control_timeout_s,
        read_timeout_s=config.read_timeout_s,
        **budget,
    )
    cases = tuple(Case(name, shape) for name in names for shape in shapes)
    request = label if kv else ""
    more = read_more(values, set(given))
    return Test(values["transport"], cases, options, values["as_json"], request, more, listed)


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    installed = sorted(installed_transports())
    for name in names:
        if name not in installed:
            raise ConfigError(
                f"KVRDMA_TRANSPORTS: transport {name!r} is not installed; installed: {', '.join(installed)}"
            )
    return names


def _refuse_unused(given: Collection[str], *, shaped: bool) -> None:
    unused = [f"--{name.replace('_', '-')}" for name in (_PLAIN if shaped else _SHAPED) if name in given]
    if unused and shaped:
        raise ConfigError(f"{' '.join(unused)} with a KV shape: the model and --tokens decide how much is read")
    if unused:
        text = "a KV shape: give --model, or --layers --kv-heads --head-dim"
        raise ConfigError(f"{' '.join(unused)} only with {text}")


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
