"""`kvrdma report`: saved reports as one page with plots and, where bytes were moved, a verdict."""

from __future__ import annotations

from pathlib import Path

import click

from kvrdma.bench.charts.contents import Yardsticks, charts_of, load_report, verdict_of
from kvrdma.bench.charts.page import page
from kvrdma.bench.charts.png import write_png
from kvrdma.cli.exits import run
from kvrdma.cli.numbers import Finite
from kvrdma.errors import ConfigError
from kvrdma.models import MODELS, model_shape

_EPILOG = """\b
Examples:
  kvrdma link-test --latency 64 --save today.json
  kvrdma report today.json --link-gbit 400 --model llama-3.1-70b --tp 4
  kvrdma report today.json yesterday.json --html compare.html --png compare.png

\b
The first report is judged: right bytes, share of the link's rate, against the second report, and
against computing the tokens again. The page loads nothing: mail it, or open it anywhere.

\b
Exit codes:
  0    the page was written, whatever the verdict
  2    wrong options, no report in a file, or the page cannot be written
  74   the output cannot be written
  130  interrupted
  141  the reader of the output has gone
"""


@click.command(epilog=_EPILOG)
@click.argument("reports", nargs=-1, required=True, metavar="A.json [B.json ...]", type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True, help="Page.")
@click.option("--png", type=click.Path(path_type=Path), help="Also the plots as a picture (needs kvrdma[report]).")
@click.option("--link-gbit", type=Finite(0.001, 1e6), help="Rate of the link, Gbit/s.")
@click.option("--model", default="llama-3.1-8b", show_default=True, metavar="NAME", help=f"One of {', '.join(MODELS)}.")
@click.option("--tokens", type=click.IntRange(1), default=8192, show_default=True, help="Length of a request.")
@click.option("--tp", type=click.IntRange(1, 1024), default=1, show_default=True, help="Ranks of an engine.")
@click.option(
    "--tflops",
    type=Finite(0.001, 1e9),
    default=400.0,
    show_default=True,
    help="What a GPU sustains in a prefill, for the time of computing again.",
)
@click.option("--prefill-tokens-per-s", type=Finite(0.001, 1e12), help="Measured, instead of --tflops.")
def report(  # noqa: PLR0913, PLR0917 - click passes every option by name
    reports: tuple[Path, ...],
    html: Path,
    png: Path | None,
    link_gbit: float | None,
    model: str,
    tokens: int,
    tp: int,
    tflops: float,
    prefill_tokens_per_s: float | None,
) -> None:
    """Turn reports of link-test and bench (--save) into one HTML page with plots, and a verdict on what was moved."""

    def work() -> None:
        model_shape(model, "give one of these to --model").heads_per_rank(tp)  # says what is wrong with them
        saved = [load_report(path) for path in reports]
        yardsticks = Yardsticks(link_gbit, model, tokens, tp, tflops, prefill_tokens_per_s)
        charts, verdict = charts_of(saved), verdict_of(saved, yardsticks)
        try:
            html.write_bytes(page(saved, charts, verdict).encode("utf-8", "backslashreplace"))
        except OSError as error:
            raise ConfigError(f"--html {html}: {error}") from error
        if png is not None:
            if not charts:
                raise ConfigError("there is nothing to plot in these reports")
            write_png(charts, png)
        for finding in verdict:
            click.echo(f"{finding.level}: {finding.check}: {finding.found}")
            if finding.why:
                click.echo(f"  {finding.why}; {finding.fix}")
        if not verdict:
            click.echo("no verdict: a model (bench --simulate) moves no bytes")
        click.echo(f"written: {html}{f', {png}' if png else ''}")

    run("report", work, as_json=False)
