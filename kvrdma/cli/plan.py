"""`kvrdma plan`: shows who would read what from whom between two engines that need not exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, Unpack, cast

import click
from click.core import ParameterSource

from kvrdma.cli.exits import JsonCommand, run
from kvrdma.cli.numbers import Finite
from kvrdma.cli.plan_report import as_json, print_plan
from kvrdma.models import stages
from kvrdma.plan.report import Link, Pair, report_pair
from kvrdma.plan.request import TokenRange
from kvrdma.plan.sketch import CacheSketch, SketchFormat
from kvrdma.topology import EngineShape

_F = TypeVar("_F", bound=Callable[..., Any])

_FORMATS = click.Choice(["HND", "NHD", "HND-outer", "NHD-outer", "CPU"])
_MAX_RANKS = 16_384
_SIDES = {"p": "producer", "d": "consumer"}
_EPILOG = """\b
Examples:
  kvrdma plan --p-tp 4 --d-tp 2 --kv-heads 8
  kvrdma plan --p-block 16 --d-block 64 --p-layout HND --d-layout NHD --json

\b
Exit codes:
  0    the plan was printed
  2    wrong options, or two engines that cannot serve each other
  74   the output cannot be written
  130  interrupted
  141  the reader of the output has gone

With --json a failure prints one object as well: kvrdma, verified (false), error, code and message.
"""


class Options(TypedDict):
    """The options of the command, as click passes them."""

    p_tp: int
    d_tp: int
    p_dcp: int
    d_dcp: int
    p_pp: int
    d_pp: int
    interleave: int
    kv_heads: int
    mla: bool
    p_block: int
    d_block: int
    p_layout: str
    d_layout: str
    layers: int
    head_dim: int
    itemsize: str
    tokens: int
    cached: int
    link: float
    row_ns: float
    draw_all: bool
    as_json: bool


def _sizes(command: Any) -> Any:  # noqa: ANN401 -- click decorators are untyped here
    """Add the options that come once per side, p- for producer and d- for consumer."""
    for side, name in reversed(_SIDES.items()):
        layout = click.option(
            f"--{side}-layout", type=_FORMATS, default="HND", show_default=True, help=f"{name}'s page format"
        )
        command = layout(command)
        for size, default, most, text in (
            ("block", 16, 1 << 20, "tokens of a block"),
            ("pp", 1, 10_000, "pipeline parallel size"),
            ("dcp", 1, 4096, "decode context parallel size, within tp"),
            ("tp", 1, 4096, "tensor parallel size"),
        ):
            option = click.option(
                f"--{side}-{size}",
                type=click.IntRange(1, most),
                default=default,
                show_default=True,
                help=f"{name}'s {text}",
            )
            command = option(command)
    return command


def _number(name: str, most: int, default: int, text: str, least: int = 1) -> Callable[[_F], _F]:
    return click.option(name, type=click.IntRange(least, most), default=default, show_default=True, help=text)


@click.command("plan", cls=JsonCommand, epilog=_EPILOG)
@_sizes
@_number("--interleave", 1 << 20, 1, "tokens in a row on a dcp rank")
@_number("--kv-heads", 10_000, 8, "of the whole model")
@click.option("--mla", is_flag=True, help="one latent of head-dim elements instead of kv heads")
@_number("--layers", 10_000, 32, "of the whole model")
@_number("--head-dim", 65_536, 128, "elements of a head")
@click.option(
    "--itemsize",
    type=click.Choice(["1", "2", "4", "8"]),
    default="2",
    show_default=True,
    help="bytes of an element",
)
@_number("--tokens", 10_000_000, 4096, "length of the request", least=0)
@_number("--cached", 10_000_000, 0, "tokens the consumer holds already", least=0)
@click.option("--link", type=Finite(0.001, 1e6), default=50.0, show_default=True, help="GB/s of a rank")
@click.option("--row-ns", type=Finite(0, 1e9), default=600.0, show_default=True, help="cost of one row")
@click.option("--all", "draw_all", is_flag=True, help="show and draw every rank, not groups of equal ones")
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON object")
def plan_command(**options: Unpack[Options]) -> None:
    """Show what each consumer rank reads from each producer rank, and what that costs."""
    pair = _pair(options)
    link = Link(options["link"], options["row_ns"])

    def work() -> None:
        reports = report_pair(pair)
        if options["as_json"]:
            inputs = {name: value for name, value in options.items() if name not in {"as_json", "draw_all"}}
            inputs["itemsize"] = int(options["itemsize"])
            click.echo(json.dumps(as_json(pair, reports, link, inputs)))
        else:
            print_plan(pair, reports, link, every=options["draw_all"])

    run("plan", work, as_json=options["as_json"], code=2)


def _pair(options: Options) -> Pair:
    names = tuple(f"layer.{i}" for i in range(options["layers"]))
    context = click.get_current_context()
    if options["mla"] and context.get_parameter_source("kv_heads") == ParameterSource.COMMANDLINE:
        raise click.UsageError("--kv-heads with --mla: a latent has no kv heads; leave one of them out")
    if options["cached"] > options["tokens"]:
        raise click.UsageError(f"--cached {options['cached']} is more than --tokens {options['tokens']}")
    content = options["head_dim"] * (1 if options["mla"] else 2)

    def cache(layout: str, block: int) -> CacheSketch:
        return CacheSketch(cast("SketchFormat", layout), block, 1, names, content, int(options["itemsize"]))

    return Pair(
        _engine(options, "d", names),
        _engine(options, "p", names),
        cache(options["d_layout"], options["d_block"]),
        cache(options["p_layout"], options["p_block"]),
        TokenRange(options["cached"], options["tokens"]),
    )


def _engine(options: Options, side: str, names: tuple[str, ...]) -> EngineShape:
    given = cast("dict[str, int]", options)
    tp, dcp, pp, block = (given[f"{side}_{size}"] for size in ("tp", "dcp", "pp", "block"))
    interleave = options["interleave"] if dcp > 1 else 1
    heads = 1 if options["mla"] else options["kv_heads"]
    small, large = sorted((heads, max(1, tp // dcp)))
    divides = "one must be a multiple of the other"
    wrong = [
        (pp > len(names), f"--{side}-pp {pp} stages for --layers {len(names)}: use fewer stages"),
        (pp * tp > _MAX_RANKS, f"--{side}-tp {tp} and --{side}-pp {pp} make {pp * tp} ranks: {_MAX_RANKS} at most"),
        (tp % dcp, f"--{side}-dcp {dcp} does not divide --{side}-tp {tp}"),
        (large % small, f"--{side}-tp {tp} with --{side}-dcp {dcp}: {heads} kv heads, {tp // dcp} parts: {divides}"),
        (block % interleave, f"--interleave {interleave} does not divide --{side}-block {block}"),
    ]  # fmt: skip
    for is_wrong, text in wrong:
        if is_wrong:
            raise click.UsageError(f"{_SIDES[side]}: {text}")
    parts = tuple(tuple(names[layer] for layer in part) for part in stages(len(names), pp)) if pp > 1 else ()
    return EngineShape(tp, options["kv_heads"], dcp, interleave, options["mla"], stages=parts)
