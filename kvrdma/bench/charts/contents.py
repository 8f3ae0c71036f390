"""From saved reports to charts and a verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrdma.bench.charts.form import kind_of
from kvrdma.bench.charts.model import PARTS, BarChart, Chart, LineChart, Series, mark_text
from kvrdma.errors import ConfigError
from kvrdma.finding import Finding, green, red, yellow
from kvrdma.models import model_shape

JSON = dict[str, Any]
_ACTIVE_PARAMS = {
    "llama-3.1-8b": 8.0e9,
    "llama-3.1-70b": 70.6e9,
    "qwen3-32b": 32.8e9,
    "qwen3-235b": 22.0e9,
    "gpt-oss-120b": 5.1e9,
    "deepseek-v3": 37.0e9,
}
"""Parameters that a token passes through: a prefill takes twice as many floating point operations."""
_SLOWER = 0.9
_PATTERNS = ("fragmented", "contig", "remote_contig")


@dataclass(frozen=True, slots=True)
class Saved:
    """One saved report."""

    name: str
    kind: str
    report: JSON


@dataclass(frozen=True, slots=True)
class Yardsticks:
    """What results are compared with."""

    link_gbit: float | None = None
    model: str = "llama-3.1-8b"
    tokens: int = 8192
    tp: int = 1
    tflops: float = 400.0
    """Floating point operations a second that one GPU sustains in a prefill, in 10**12."""
    prefill_tokens_per_s: float | None = None
    """Measured; instead of ``tflops``."""

    @property
    def recompute_s(self) -> float:
        """How long the model would take to compute the tokens again."""
        if self.prefill_tokens_per_s is not None:
            return self.tokens / self.prefill_tokens_per_s
        name = next(key for key in _ACTIVE_PARAMS if model_shape(key) is model_shape(self.model))
        return 2 * _ACTIVE_PARAMS[name] * self.tokens / (self.tflops * 1e12 * self.tp)

    @property
    def nbytes(self) -> int:
        """Bytes that one rank has to read instead."""
        kv = model_shape(self.model)
        return kv.layers * kv.token_bytes(self.tp) * self.tokens


def load_report(path: Path) -> Saved:
    """Read a file that ``--save`` has written.

    Raises:
        ConfigError: it is none.
    """
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read as a saved report: {why}") from error
    try:
        kind = kind_of(report)
    except ValueError as error:
        raise ConfigError(
            f"{path} is no report of kvrdma: {error}; make one with `kvrdma link-test --save` or `kvrdma bench --save`"
        ) from None
    return Saved(path.stem.encode("utf-8", "backslashreplace").decode(), kind, report)


def charts_of(saved: Sequence[Saved]) -> list[Chart]:
    """Make every chart that there is something to show in."""
    made = [_throughput(saved), _latency(saved), _split(saved)]
    return [chart for chart in made if chart is not None]


def _throughput(saved: Sequence[Saved]) -> LineChart | None:
    series: list[Series] = []
    for number, each in enumerate(one for one in saved if one.kind == "link"):
        for colour, pattern in enumerate(_PATTERNS):
            cases = sorted(
                (c for c in each.report["cases"] if c["pattern"] == pattern), key=lambda c: int(c["block_bytes"])
            )
            if cases:
                x = tuple(float(c["block_bytes"]) for c in cases)
                y = tuple(float(c["gb_per_s"]["median"]) for c in cases)
                series.append(Series(f"{each.name}: {pattern}", x, y, colour, dashed=number > 0))
    if not series:
        return None
    return LineChart("Throughput by block size and pattern", "bytes of a block", "GB/s, median", tuple(series), "bytes")


def _latency(saved: Sequence[Saved]) -> LineChart | None:
    series: list[Series] = []
    for each in saved:
        micros, what = _times_us(each)
        if micros:
            x = tuple(max(value, 1e-3) for value in micros)
            y = tuple(100 * (i + 1) / len(micros) for i in range(len(micros)))
            series.append(Series(f"{each.name}: {what}", x, y, len(series)))
    if not series:
        return None
    return LineChart(
        "Latency: share of reads that ended within a time", "time of a read", "% of reads", tuple(series), "us"
    )


def _times_us(saved: Saved) -> tuple[list[float], str]:
    latency = saved.report.get("latency")
    if saved.kind == "link" and latency:
        return list(latency["cdf_us"]), f"{latency['nbytes']} B, {latency['depth']} in flight"
    if saved.kind == "bench":
        times = sorted(1e3 * ms for ms in saved.report.get("samples", {}).get("pull_ms", ()))
        step = max(1, len(times) // 200)
        return times[::step], "pulls"
    return [], ""


def _split(saved: Sequence[Saved]) -> BarChart | None:
    labels: list[str] = []
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    for each in saved:
        for label, split in _splits(each):
            labels.append(label)
            for name, heights in parts.items():
                heights.append(split.get(name, 0.0))
    if not labels:
        return None
    used = {name: tuple(heights) for name, heights in parts.items() if any(heights)}
    return BarChart("Where the time of a transfer goes", "milliseconds", tuple(labels), used)


def _splits(saved: Saved) -> list[tuple[str, Mapping[str, float]]]:
    if saved.kind == "bench":
        ranks = [{part: rank["split_ms"][part]["mean"] for part in PARTS} for rank in saved.report["ranks"]]
        rows = [row for row in ranks if None not in row.values()]
        if not rows:
            return []
        mean = {part: sum(row[part] for row in rows) / len(rows) for part in PARTS}
        return [(f"{saved.name}\nmean of pulls", mean)]
    if saved.kind == "link":
        cases = [case for case in saved.report["cases"] if case["pattern"] == _pattern_shown(saved)]
        return [(f"{saved.name}\n{mark_text(case['block_bytes'], 'bytes')}", _link_split(case)) for case in cases]
    return []


def _pattern_shown(saved: Saved) -> str:
    there = {case["pattern"] for case in saved.report["cases"]}
    return next(pattern for pattern in _PATTERNS if pattern in there)


def _link_split(case: JSON) -> dict[str, float]:
    post = float(case["blocking_us"]["median"]) / 1e3
    return {"post": post, "wait": max(0.0, float(case["total_ms"]["median"]) - post)}


def speed_of(saved: Saved) -> float | None:
    """Give the GB/s of one rank: the best median of a link test, the mean rank of a benchmark."""
    if saved.kind == "link":
        return float(_fastest(saved)["gb_per_s"]["median"])
    if saved.kind == "bench":
        speeds = [float(rank["gb_per_s"]) for rank in saved.report["ranks"]]
        return sum(speeds) / len(speeds) if speeds else None
    return None


def _fastest(saved: Saved) -> JSON:
    cases: list[JSON] = saved.report["cases"]
    return max(cases, key=lambda case: float(case["gb_per_s"]["median"]))


def _measured(saved: Saved) -> str:
    """Say what the speed is of."""
    if saved.kind == "bench":
        return "mean of the ranks"
    return f"median of {_case_name(_fastest(saved))}"


def _case_name(case: JSON) -> str:
    return f"{case['pattern']} {mark_text(case['block_bytes'], 'bytes')}"


def verdict_of(saved: Sequence[Saved], yardsticks: Yardsticks) -> list[Finding]:
    """Judge the first report: right bytes, link rate, the second report, computing again."""
    first = saved[0]
    found = [_bytes(each) for each in saved if each.kind != "simulate"]
    speed = speed_of(first)
    if speed:
        found += [_link_rate(first, speed, yardsticks), _recompute(speed, yardsticks)]
    if len(saved) > 1:
        found += _previous(first, saved[1])
    return found


def _bytes(saved: Saved) -> Finding:
    if saved.report["verified"]:
        return green("bytes", f"{saved.name}: every byte was verified")
    why = "answers would be computed from wrong bytes"
    return red("bytes", f"{saved.name}: wrong bytes, or not verified", why, "kvrdma doctor; report it with this page")


def _link_rate(saved: Saved, speed: float, yardsticks: Yardsticks) -> Finding:
    measured = _measured(saved)
    if yardsticks.link_gbit is None:
        why = "without the link's rate nobody knows what it should be"
        if saved.kind == "link":
            ratio = float(_fastest(saved)["memcpy_ratio"])
            why += f"; within one host there is none: it is {ratio:.2g} times a memcpy of the same rows"
        fix = "between hosts give --link-gbit, the rate of the NIC (kvrdma doctor prints it)"
        return yellow("link rate", f"{speed:.2f} GB/s ({measured})", why, fix)
    share = speed * 8 / yardsticks.link_gbit
    text = f"{speed:.2f} GB/s, {share:.0%} of {yardsticks.link_gbit:g} Gbit/s ({measured})"
    if share >= 0.8:
        return green("link rate", text)
    why = "a link does 80 to 97 % with large blocks: something else is the limit"
    return yellow("link rate", text, why, "larger blocks, more streams (--streams), the NIC next to the GPU (doctor)")


def _recompute(speed: float, yardsticks: Yardsticks) -> Finding:
    moved_s, computed_s = yardsticks.nbytes / speed / 1e9, yardsticks.recompute_s
    basis = (
        f"{yardsticks.prefill_tokens_per_s:g} tokens/s"
        if yardsticks.prefill_tokens_per_s
        else f"{yardsticks.tflops:g} TFLOP/s a GPU"
    )
    text = (
        f"{yardsticks.tokens} tokens of {yardsticks.model}, tp {yardsticks.tp}: {moved_s * 1e3:.0f} ms to move, "
        f"{computed_s * 1e3:.0f} ms to compute again (at {basis}): {computed_s / moved_s:.2g} times as long"
    )
    if moved_s <= computed_s:
        return green("against computing again", text)
    return yellow("against computing again", text, "over this link moving is slower than computing", "a faster link")


def _previous(first: Saved, second: Saved) -> list[Finding]:
    if first.kind != second.kind:
        return [yellow("against the other run", "of another kind", "they cannot be compared", "two of one kind")]
    ratios = _ratios(first, second)
    if not ratios:
        return [yellow("against the other run", "no case in common", "they cannot be compared", "the same options")]
    text = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
    found = f"{first.name} is this much of {second.name}: {text}"
    if min(ratios.values()) >= _SLOWER:
        return [green("against the other run", found)]
    why = "a single run differs by 10 to 20 %; more is a change of machine, load or code"
    return [yellow("against the other run", found, why, "repeat both in turns; kvrdma doctor on both")]


def _ratios(first: Saved, second: Saved) -> dict[str, float]:
    if first.kind == "bench":
        one, other = speed_of(first), speed_of(second)
        return {"mean rank": one / other} if one and other else {}
    if first.kind == "simulate":
        return {}
    before = {(c["pattern"], c["block_bytes"]): float(c["gb_per_s"]["median"]) for c in second.report["cases"]}
    return {
        _case_name(case): float(case["gb_per_s"]["median"]) / before[key]
        for case in first.report["cases"]
        if before.get(key := (case["pattern"], case["block_bytes"]))
    }
