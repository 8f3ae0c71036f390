"""One self-contained HTML page: verdict, charts, figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from kvrdma import __version__
from kvrdma.bench.charts.contents import Saved
from kvrdma.bench.charts.model import COLOURS, PARTS, Chart, mark_text
from kvrdma.bench.charts.svg import draw
from kvrdma.finding import Finding

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1c2430; --soft: #5b6675; --line: #e2e7ee; --card: #f7f9fb;
  --green: #047857; --yellow: #b45309; --red: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161c; --ink: #e8ecf1; --soft: #9aa6b5; --line: #2a323d;
  --card: #191f27; --green: #34d399; --yellow: #fbbf24; --red: #f87171; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1360px; padding: 32px 24px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 32px 0 12px; }
p.sub { color: var(--soft); margin: 0; }
.verdict { list-style: none; margin: 20px 0 0; padding: 0; border: 1px solid var(--line); border-radius: 8px;
  background: var(--card); }
.verdict li { padding: 10px 16px; display: grid; grid-template-columns: 20px 190px 1fr; gap: 4px 10px; }
.verdict li + li { border-top: 1px solid var(--line); }
.verdict b { font-weight: 600; } .verdict small { grid-column: 3; color: var(--soft); font-size: 13px; }
.green { color: var(--green); } .yellow { color: var(--yellow); } .red { color: var(--red); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 20px;
  margin-top: 24px; }
figure { margin: 0; padding: 16px; border: 1px solid var(--line); border-radius: 8px; background: var(--card); }
figcaption { font-weight: 600; margin-bottom: 8px; } figure > svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--line); stroke-width: 1; } .mark { fill: var(--soft); font-size: 12px; }
.label { fill: var(--soft); font-size: 12px; } path { fill: none; stroke-width: 2; stroke-linejoin: round; }
circle { stroke: var(--card) !important; stroke-width: 2; } .dashed { stroke-dasharray: 6 4; }
.legend { list-style: none; margin: 8px 0 0; padding: 0; display: flex; flex-wrap: wrap; gap: 4px 18px;
  color: var(--soft); font-size: 13px; }
.legend svg { height: 10px; width: auto; margin-right: 6px; } .legend line { stroke-width: 2.5; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 12px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; }
details { margin-top: 24px; } pre { overflow-x: auto; background: var(--card); padding: 12px; border-radius: 8px;
  font-size: 12px; }
@media (max-width: 640px) { body { padding: 20px 12px; } .verdict li { grid-template-columns: 20px 1fr; }
  .verdict li > :nth-child(n + 3) { grid-column: 2; } .mark, .label { font-size: 16px; } }
"""
_SYMBOLS = {"green": "●", "yellow": "▲", "red": "✖"}


def page(saved: Sequence[Saved], charts: Sequence[Chart], verdict: Sequence[Finding]) -> str:
    """Write the page; it loads nothing and runs nothing."""
    colours = "".join(map(_colour, range(len(COLOURS))))
    names = " and ".join(escape(each.name) for each in saved)
    figures = "".join(_figures(each) for each in saved)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kvrdma: {names}</title><style>{_STYLE}{colours}</style></head><body>"
        f'<h1>KV transfer: {names}</h1><p class="sub">kvrdma {escape(__version__)}</p>'
        f'<ul class="verdict">{"".join(map(_line, verdict))}</ul>'
        f'<div class="charts">{"".join(map(draw, charts))}</div>{figures}'
        f"{''.join(map(_raw, saved))}</body></html>\n"
    )


def _colour(number: int) -> str:
    value = COLOURS[number]
    areas = f"rect.c{number}, circle.c{number} {{ fill: {value}; stroke: none; }}"
    return f".c{number} {{ stroke: {value}; }} {areas}\n"


def _line(finding: Finding) -> str:
    more = f"<small>{escape(finding.why)}; {escape(finding.fix)}</small>" if finding.why else ""
    symbol = _SYMBOLS[finding.level]
    return (
        f'<li><span class="{finding.level}" role="img" aria-label="{finding.level}">{symbol}</span>'
        f"<b>{escape(finding.check)}</b><span>{escape(finding.found)}</span>{more}</li>"
    )


def _figures(saved: Saved) -> str:
    return {"link": _link_figures, "bench": _bench_figures, "simulate": _model_figures}[saved.kind](saved)


def _link_figures(saved: Saved) -> str:
    head = ("pattern", "block", "rows", "merged", "GB/s median", "best", "ms", "held µs", "of memcpy")
    rows = [
        (
            case["pattern"],
            mark_text(case["block_bytes"], "bytes"),
            case["rows"],
            case["rows_posted"],
            _number(case["gb_per_s"]["median"]),
            _number(case["gb_per_s"]["best"]),
            _number(case["total_ms"]["median"]),
            f"{case['blocking_us']['median']:.0f}",
            _number(case["memcpy_ratio"]),
        )
        for case in saved.report["cases"]
    ]
    title = f"{saved.name}: {saved.report['transport']}, {'one-sided' if saved.report['one_sided'] else 'emulated'}"
    return _table(title, head, rows)


def _bench_figures(saved: Saved) -> str:
    head = ("rank", "GB/s", "pulls", "p50 ms", "p99 ms", *(f"{part} ms" for part in PARTS), "fence")
    rows = [
        (
            f"{rank['host']} {rank['rank']}",
            _number(rank["gb_per_s"]),
            rank["pulls"],
            *(_number(rank["pull_ms"][mark]) for mark in ("p50", "p99")),
            *(_number(rank["split_ms"][part]["p50"]) for part in PARTS),
            rank["fence_rejections"],
        )
        for rank in saved.report["ranks"]
    ]
    rivals = [
        (each["name"], each["rows"], each["block_bytes"],
         _number(each["gb_per_s"]["median"]) if each["verified"] else f"failed: {each['error'].splitlines()[-1][:80]}")
        for each in saved.report.get("rivals", ())
    ]  # fmt: skip
    others = _table(f"{saved.name}: the same rows by others", ("library", "rows", "bytes", "GB/s"), rivals)
    return _table(f"{saved.name}: {saved.report['total']['gb_per_s']:.2f} GB/s in total", head, rows) + others


def _model_figures(saved: Saved) -> str:
    items = [(name.replace("_", " "), value) for name, value in saved.report["result"].items() if name != "request_ms"]
    return _table(f"{saved.name}: model of many engines", ("what", "value"), items)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<h2>{escape(title)}</h2><div class="wide"><table><tr>{cells}</tr>{body}</table></div>'


def _raw(saved: Saved) -> str:
    kept = {key: value for key, value in saved.report.items() if key != "samples"}
    text = escape(json.dumps(kept, indent=1))
    return f"<details><summary>{escape(saved.name)}: the whole report</summary><pre>{text}</pre></details>"
