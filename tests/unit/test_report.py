"""`kvrdma report`: verdicts, charts, and a page that needs nothing else."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvrdma.bench.charts.contents import Saved, Yardsticks, charts_of, load_report, speed_of, verdict_of
from kvrdma.bench.charts.model import BarChart, LineChart, mark_text, x_marks
from kvrdma.bench.charts.page import page
from kvrdma.bench.charts.svg import draw, nice_marks
from kvrdma.cli import main
from kvrdma.errors import ConfigError
from kvrdma.finding import Finding


def case(pattern: str, block: int, speed: float) -> dict[str, Any]:
    return {
        "pattern": pattern, "block_bytes": block, "rows": 8, "rows_posted": 8, "nbytes": 8 * block, "verified": True,
        "blocking_us": {"best": 100.0, "median": 250.0}, "total_ms": {"best": 1.0, "median": 2.0},
        "gb_per_s": {"best": speed, "median": speed}, "memcpy_gb_per_s": 5.0, "memcpy_ratio": 0.5,
    }  # fmt: skip


def link(name: str = "a", speeds: tuple[float, ...] = (10.0, 40.0), *, verified: bool = True) -> Saved:
    cases = [case("fragmented", 4096 << (4 * i), speed) for i, speed in enumerate(speeds)]
    latency = {"nbytes": 64, "depth": 2, "cdf_us": [1.0, 2.0, 4.0]}
    report = {
        "kind": "link",
        "transport": "x",
        "one_sided": True,
        "verified": verified,
        "cases": cases,
        "latency": latency,
    }
    return Saved(name, "link", report)


def bench(name: str = "b", speed: float = 3.0) -> Saved:
    split = {
        part: {"mean": mean, "p50": mean}
        for part, mean in zip(("plan", "post", "wait", "reshape"), (1, 2, 3, 4), strict=True)
    }
    rank = {"rank": "consumer0 (0, 0)", "host": "<h>", "gb_per_s": speed, "pulls": 4, "fence_rejections": 0,
            "pull_ms": {"p50": 5.0, "p99": None}, "split_ms": split}  # fmt: skip
    report = {"kind": "bench", "verified": True, "ranks": [rank], "total": {"gb_per_s": speed}, "rivals": [],
              "samples": {"pull_ms": [3.0, 1.0, 2.0]}}  # fmt: skip
    return Saved(name, "bench", report)


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_a_verdict_compares_with_the_link_the_other_run_and_computing_again() -> None:
    found = by_check(verdict_of([link(), link("before", (20.0, 40.0))], Yardsticks(link_gbit=400)))
    assert found["bytes"].level == "green"
    assert found["link rate"].found == "40.00 GB/s, 80% of 400 Gbit/s (median of fragmented 64 KiB)"
    assert found["link rate"].level == "green"
    assert found["against the other run"].level == "yellow"
    assert "fragmented 4 KiB 0.50x, fragmented 64 KiB 1.00x" in found["against the other run"].found
    # 8192 tokens x 131072 bytes at 40 GB/s; 2 x 8e9 x 8192 operations at 400e12 a second.
    assert "27 ms to move, 328 ms to compute again" in found["against computing again"].found
    assert found["against computing again"].level == "green"


def test_a_slow_link_and_wrong_bytes_are_named() -> None:
    found = by_check(verdict_of([link(speeds=(0.1,), verified=False)], Yardsticks(prefill_tokens_per_s=50_000)))
    assert found["bytes"].level == "red"
    assert found["link rate"].level == "yellow"
    assert found["against computing again"].level == "yellow"
    assert "164 ms to compute again (at 50000 tokens/s)" in found["against computing again"].found
    same = by_check(verdict_of([link(), link()], Yardsticks()))
    assert same["against the other run"].level == "green"
    assert by_check(verdict_of([link(), bench()], Yardsticks()))["against the other run"].found == "of another kind"
    assert speed_of(bench()) == 3.0


def test_tp_shares_bytes_and_work() -> None:
    one, four = Yardsticks(model="llama-3.1-70b"), Yardsticks(model="llama-3.1-70b", tp=4)
    assert one.nbytes == 4 * four.nbytes == 8192 * 80 * 2 * 8 * 128 * 2
    assert one.recompute_s == pytest.approx(4 * four.recompute_s)


def test_charts_hold_the_figures() -> None:
    throughput, latency, split = charts_of([link(), bench()])
    assert isinstance(throughput, LineChart)
    assert throughput.series[0].x == (4096.0, 65536.0)
    assert throughput.series[0].y == (10.0, 40.0)
    assert isinstance(latency, LineChart)
    assert [series.x for series in latency.series] == [(1.0, 2.0, 4.0), (1000.0, 2000.0, 3000.0)]
    assert latency.series[0].y[-1] == 100.0
    assert isinstance(split, BarChart)
    assert split.labels == ("a\n4 KiB", "a\n64 KiB", "b\nmean of pulls")
    assert split.parts == {"plan": (0.0, 0.0, 1.0), "post": (0.25, 0.25, 2.0), "wait": (1.75, 1.75, 3.0),
                           "reshape": (0.0, 0.0, 4.0)}  # fmt: skip
    assert charts_of([Saved("s", "simulate", {"kind": "simulate"})]) == []


def test_points_are_drawn_where_they_belong() -> None:
    text = draw(charts_of([link(speeds=(5.0, 10.0))])[0])
    (path,) = re.findall(r'<path class="c0" d="M([\d.]+),([\d.]+) L([\d.]+),([\d.]+)"', text)
    assert [float(value) for value in path] == [64.0, 152.0, 612.0, 16.0], "half of the height, then all of it"
    assert "<title>a: fragmented: 10 at 64 KiB</title>" in text
    rects = re.findall(
        r'<rect class="(c\d)" x="[\d.]+" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', draw(charts_of([bench()])[1])
    )
    assert [name for name, _, _ in rects] == ["c0", "c1", "c2", "c3"]
    assert float(rects[3][1]) < float(rects[0][1]), "the last part is on top"


def test_marks_are_round() -> None:
    assert nice_marks(9.3) == [0, 2, 4, 6, 8, 10]
    assert nice_marks(0.03) == [0, 0.01, 0.02, 0.03]
    assert nice_marks(0) == [0, 1]
    assert x_marks(4096, 1 << 20, "bytes") == [2.0**n for n in range(12, 21)]
    assert len(x_marks(8, 1 << 40, "bytes")) <= 9
    assert x_marks(40, 330, "us") == [50, 100, 200]
    assert x_marks(30_000, 400_000, "us") == [50_000, 100_000, 200_000]
    assert x_marks(0.5, 2e6, "us") == [1, 10, 100, 1000, 10_000, 100_000, 1_000_000]
    assert [mark_text(v, "us") for v in (0.5, 20, 5000, 2e6)] == ["0.5 µs", "20 µs", "5 ms", "2 s"]
    assert [mark_text(v, "bytes") for v in (512, 4096, 1 << 20, 3 << 30)] == ["512 B", "4 KiB", "1 MiB", "3 GiB"]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [str(value) for name, value in attrs if name in ("src", "href")]
        self.loads += [tag] if tag in ("script", "link", "img", "iframe") else []
        if tag not in ("meta", "line", "circle", "rect", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("line", "circle", "rect", "path"):
            return
        assert self.open.pop() == tag, f"</{tag}> closes something else"


def test_the_page_loads_nothing_and_escapes_names() -> None:
    saved = [link("<b>"), bench()]
    text = page(saved, charts_of(saved), verdict_of(saved, Yardsticks()))
    tags = Tags()
    tags.feed(text)
    assert (tags.loads, tags.open) == ([], [])
    assert "url(" not in text
    assert "<b>:" not in text
    assert "&lt;h&gt;" in text
    assert text.count("<figure>") == 3
    assert all(f"{part} ms</th>" in text for part in ("plan", "post", "wait", "reshape"))


def test_the_command_writes_a_page_and_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(link().report))
    words = ["report", str(path), "--html", str(tmp_path / "r.html"), "--link-gbit", "400"]
    ended = CliRunner().invoke(main, words)
    assert ended.exit_code == 0, ended.output
    assert "green: link rate: 40.00 GB/s, 80% of 400 Gbit/s (median of fragmented 64 KiB)\n" in ended.output
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    pytest.importorskip("matplotlib", reason="needs the extra report")
    ended = CliRunner().invoke(main, [*words, "--png", str(tmp_path / "r.png")])
    assert ended.exit_code == 0, ended.output
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_says_why_a_finding_is_not_green(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(link(verified=False).report))
    ended = CliRunner().invoke(main, ["report", str(path), "--html", str(tmp_path / "r.html")])
    assert ended.exit_code == 0, ended.output
    lines = ended.output.splitlines()
    rate = lines.index("yellow: link rate: 40.00 GB/s (median of fragmented 64 KiB)")
    assert re.fullmatch(
        r"  without the link's rate nobody knows what it should be; within one host there is none: it is [\d.]+ times "
        r"a memcpy of the same rows; between hosts give --link-gbit, the rate of the NIC \(kvrdma doctor prints it\)",
        lines[rate + 1],
    )
    assert lines[1] == "  answers would be computed from wrong bytes; kvrdma doctor; report it with this page"
    assert sum(line.startswith(" ") for line in lines) == sum(line.startswith(("red", "yellow")) for line in lines)
    path.write_text(json.dumps(bench().report))
    ended = CliRunner().invoke(main, ["report", str(path), "--html", str(tmp_path / "r.html")])
    assert "yellow: link rate: 3.00 GB/s (mean of the ranks)\n" in ended.output


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    for text in ("nonsense", "[1]", '{"kind": "other"}'):
        path = tmp_path / "x.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"x\.json"):
            load_report(path)
        assert CliRunner().invoke(main, ["report", str(path)]).exit_code == 2
    assert CliRunner().invoke(main, ["report", str(tmp_path / "none.json")]).exit_code == 2


ODD: tuple[Any, ...] = (None, "", -1, 0, 1.5, 5e-324, 1e308, float("nan"), float("inf"), 10**400, "x" * 1000, [], {},
       [[]], True, "</script><b>", "\ud800")  # fmt: skip
RIVALS = [
    {"name": "nixl", "rows": 1, "block_bytes": 2, "verified": True, "gb_per_s": {"median": 1.0}},
    {"name": "mooncake", "rows": 1, "block_bytes": 2, "verified": False, "error": "no\nway"},
]
MODEL = {"kind": "simulate", "result": {"engines": 4, "request_ms": {"mean": 1.0}}}
WHOLE: list[dict[str, Any]] = [link().report, {**bench().report, "rivals": RIVALS}, MODEL]


def altered(report: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reports in which one value is odd or missing, and its key."""

    def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            if isinstance(inner, dict | list):
                yield from places(inner, (*path, key))

    for *path, last in places(report):
        for odd in (*ODD, ...):
            changed = copy.deepcopy(report)
            inside: Any = changed
            for key in path:
                inside = inside[key]
            if odd is ...:
                del inside[last]
            else:
                inside[last] = odd
            yield str(last), changed


def loaded(path: Path) -> tuple[list[Saved], str]:
    try:
        return [load_report(path)], ""
    except ConfigError as error:
        return [], str(error)


@pytest.mark.parametrize("whole", WHOLE, ids=lambda report: str(report["kind"]))
def test_whatever_a_file_holds_it_is_shown_or_refused_by_name(whole: dict[str, Any], tmp_path: Path) -> None:
    path, shown, refused = tmp_path / "r.json", 0, 0
    for key, report in altered(whole):
        path.write_text(json.dumps(report))
        saved, why = loaded(path)
        if why:
            refused += 1
            assert re.match(rf"{path} (is no report of kvrdma|cannot be read as a saved report): ", why)
            assert f"`{key}`" in why or "`$" in why or "surrogates" in why or "value " in why, (key, why)
            continue
        saved.append(Saved("whole", whole["kind"], whole))
        shown += 1
        text = page(saved, charts_of(saved), verdict_of(saved, Yardsticks()))
        assert "</script><b>" not in text
    assert shown > 10
    assert refused > 10 or whole is MODEL


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cases": []}, r"Expected `array` of length >= 1 - at `\$.cases`"),
        ({"verified": "yes"}, r"Expected `bool`, got `str` - at `\$.verified`"),
        ({"cases": [{**case("contig", 8, 1.0), "gb_per_s": {"best": 1.0, "median": "2"}}]},
         r"Expected `float`, got `str` - at `\$.cases\[0\].gb_per_s.median`"),
        ({"kind": "other"}, "Invalid value 'other'"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_report_is_named(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(link().report | change))
    with pytest.raises(ConfigError, match=rf"a\.json is no report of kvrdma: {says}"):
        load_report(path)


def test_reports_of_this_version_are_in_form(tmp_path: Path) -> None:
    saved = [tmp_path / "link.json", tmp_path / "model.json"]
    small = ["link-test", "--transport", "memory", "--nbytes", "64K", "--block", "4K", "--iters", "1", "--latency", "8"]
    assert CliRunner().invoke(main, [*small, "--save", str(saved[0])]).exit_code == 0
    model = ["bench", "--simulate", "--engines", "2", "--set", "prompt.tokens=64"]
    assert CliRunner().invoke(main, [*model, "--save", str(saved[1])]).exit_code == 0
    ended = CliRunner().invoke(main, ["report", *map(str, saved), "--html", str(tmp_path / "r.html")])
    assert ended.exit_code == 0, ended.output


def test_names_of_files_are_only_names(tmp_path: Path) -> None:
    for name in ("$x_", "_$\\frac$", "\udcff"):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(link().report))
        words = ["report", str(path), "--html", str(tmp_path / "r.html")]
        assert CliRunner().invoke(main, words).exit_code == 0
        pytest.importorskip("matplotlib", reason="needs the extra report")
        assert CliRunner().invoke(main, [*words, "--png", str(tmp_path / "r.png")]).exit_code == 0
        ended = CliRunner().invoke(main, [*words, "--png", str(tmp_path / "r.nope")])
        assert ended.exit_code == 2
        assert "the picture cannot be written" in ended.stderr


def test_a_file_of_brackets_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read as a saved report"):
        load_report(path)
