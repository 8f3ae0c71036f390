"""What a multi-node benchmark found out, per rank and in total."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvrdma import __version__
from kvrdma.bench.cluster.consumer import Outcome, unexpected
from kvrdma.bench.cluster.scenario import Scenario

JSON = dict[str, Any]
_PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Give the nearest-rank percentile: the least value that so many percent do not exceed; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(percent * len(ordered) / 100, 6)) - 1)]


def spread(values: Sequence[float], scale: float = 1e3) -> JSON:
    """Give mean, percentiles and the largest, scaled (to milliseconds); None of nothing."""
    if not values:
        return dict.fromkeys(("mean", *(f"p{p}" for p in _PERCENTILES), "max"))
    marks = {f"p{p}": round(percentile(values, p) * scale, 4) for p in _PERCENTILES}
    return {"mean": round(sum(values) / len(values) * scale, 4), **marks, "max": round(max(values) * scale, 4)}


def busy_seconds(outcomes: Iterable[Outcome]) -> float:
    """Give the time during which a pull was under way; what lies between, checks of bytes, does not count."""
    total_s, until_s = 0.0, 0.0
    for each in sorted(outcomes, key=lambda one: one.began_s):
        total_s += max(0.0, each.ended_s - max(each.began_s, until_s))
        until_s = max(until_s, each.ended_s)
    return total_s


def rank_report(name: str, host: str, outcomes: Sequence[Outcome], stats: Mapping[str, int], *, restart: bool) -> JSON:
    """Sum up one consumer rank; with ``restart`` requests may fail by the producer's restart."""
    done = [each for each in outcomes if each.result == "done"]
    bad = [each for each in outcomes if unexpected(each, restart=restart)]
    busy_s = busy_seconds(done)
    nbytes = sum(each.nbytes for each in done)
    parts = ("plan", "post", "wait", "reshape")
    return {
        "rank": name,
        "host": host,
        "pulls": len(outcomes),
        "results": dict(Counter(each.result for each in outcomes)),
        "unexpected": [f"request {each.request}: {each.result} {each.why}" for each in bad[:20]],
        "wrong_rows": sum(each.wrong_rows for each in done),
        "nbytes": nbytes,
        "gb_per_s": round(nbytes / busy_s / 1e9, 4) if busy_s else 0.0,
        "rows": sum(each.rows for each in done),
        "rows_posted": sum(each.rows_posted for each in done),
        "pull_ms": spread([each.ended_s - each.began_s for each in done]),
        "late_ms": spread([each.began_s - each.due_s for each in done if each.due_s]),
        "split_ms": {part: spread([getattr(each, f"{part}_s") for each in done]) for part in parts},
        "fence_rejections": stats.get("fence_rejections", 0),
        "retried": stats.get("pulls_retried", 0),
        "handshakes": stats.get("handshakes", 0),
    }


def total_report(scenario: Scenario, ranks: Sequence[JSON], outcomes: Mapping[str, Sequence[Outcome]]) -> JSON:
    """Sum up all consumer ranks: a request is over when its slowest rank is."""
    by_request: dict[int, list[Outcome]] = defaultdict(list)
    for each in (one for many in outcomes.values() for one in many):
        by_request[each.request].append(each)
    done = {r: many for r, many in by_request.items() if all(one.result == "done" for one in many)}
    seconds = [max(one.ended_s for one in many) - min(one.began_s for one in many) for many in done.values()]
    nbytes = sum(rank["nbytes"] for rank in ranks)
    ended_s = max((one.ended_s for many in by_request.values() for one in many), default=0.0)
    flat = [one for many in done.values() for one in many]
    busy_s = busy_seconds([one for many in by_request.values() for one in many if one.result == "done"])
    return {
        "requests": len(by_request),
        "requests_done": len(done),
        "tokens": sum(scenario.lengths()[r] for r in done),
        "seconds": round(ended_s, 4),
        "nbytes": nbytes,
        "busy_seconds": round(busy_s, 4),
        "gb_per_s": round(nbytes / busy_s / 1e9, 4) if busy_s else 0.0,
        "request_ms": spread(seconds),
        "rows": sum(rank["rows"] for rank in ranks),
        "rows_posted": sum(rank["rows_posted"] for rank in ranks),
        "fence_rejections": sum(rank["fence_rejections"] for rank in ranks),
        "wrong_rows": sum(rank["wrong_rows"] for rank in ranks),
        "unexpected": [f"{rank['rank']}: {text}" for rank in ranks for text in rank["unexpected"]][:20],
        "nixlbench": nixlbench_row(flat),
    }


def nixlbench_row(done: Sequence[Outcome]) -> JSON:
    """Give the columns of nixlbench's table that have a counterpart here, under its names.

    A batch is the rows of one pull of one rank; "Prep" is the plan, "Post" handing it over, "Tx" until the data was
    there. The bandwidth is that of the transfers, not of the whole run.
    """
    rows = sum(each.rows_posted for each in done)
    busy_s = sum(each.post_s + each.wait_s for each in done)
    nbytes = sum(each.nbytes for each in done)
    prep, post = [each.plan_s for each in done], [each.post_s for each in done]
    sent = [each.post_s + each.wait_s for each in done]
    return {
        "Block Size (B)": round(nbytes / rows) if rows else None,
        "Batch Size": round(rows / len(done)) if done else None,
        "B/W (GB/Sec)": round(nbytes / busy_s / 1e9, 6) if busy_s else None,
        "Avg Lat. (us)": round(sum(sent) / rows * 1e6, 3) if rows else None,
        "Avg Prep (us)": _mean_us(prep),
        "P99 Prep (us)": _worst_us(prep),
        "Avg Post (us)": _mean_us(post),
        "P99 Post (us)": _worst_us(post),
        "Avg Tx (us)": _mean_us(sent),
        "P99 Tx (us)": _worst_us(sent),
    }


def _mean_us(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values) * 1e6, 3) if values else None


def _worst_us(values: Sequence[float]) -> float | None:
    return round(percentile(values, 99) * 1e6, 3) if values else None


def whole_report(scenario: Scenario, total: JSON, ranks: Sequence[JSON], extra: JSON) -> JSON:
    """Put everything into one object."""
    import msgspec

    return {
        "kind": "bench",
        "kvrdma": __version__,
        "verified": bool(scenario.verify and not total["wrong_rows"]),
        "scenario": msgspec.to_builtins(scenario),
        "total": total,
        "ranks": list(ranks),
        **extra,
    }
