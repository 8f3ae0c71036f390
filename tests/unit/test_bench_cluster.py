"""The multi-node benchmark with threads for processes: right bytes, known failures, honest sums."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvrdma import wire
from kvrdma.bench.cluster import rivals
from kvrdma.bench.cluster.cache import RankCache
from kvrdma.bench.cluster.consumer import Outcome, unexpected
from kvrdma.bench.cluster.counters import difference, nic_bytes
from kvrdma.bench.cluster.exchange import ThreadExchange, from_launcher, wait_count
from kvrdma.bench.cluster.model_check import links_of, scenario_values
from kvrdma.bench.cluster.rank import place_of
from kvrdma.bench.cluster.run import Seat, failure_of, run_rank
from kvrdma.bench.cluster.scenario import Scenario, load_scenario, make_scenario
from kvrdma.bench.cluster.simulate import Links, Model, play, simulate
from kvrdma.bench.cluster.summary import busy_seconds, nixlbench_row, percentile, rank_report
from kvrdma.cli import main
from kvrdma.config import Config
from kvrdma.engine.producer import Producer
from kvrdma.errors import ConfigError, DataError, PullError, UnreachableError
from kvrdma.host import HostView
from kvrdma.topology import RankId

MODEL = {"layers": 4, "kv_heads": 4, "head_dim": 16}
BASE: dict[str, Any] = {
    "model": MODEL,
    "requests": 6,
    "prompt": {"kind": "uniform", "least": 1, "most": 90, "tokens": 40},
    "arrival": {"concurrency": 2},
    "transports": ["memory"],
    "timeout_s": 20.0,
}
EXAMPLES = Path(__file__).parents[2] / "examples/bench"


def scenario(**changes: Any) -> Scenario:  # noqa: ANN401 - as TOML has them
    return make_scenario({**BASE, **changes}, "of a test")


def run_all(what: Scenario) -> dict[str, Any]:
    """Run every rank in a thread; gives rank 0's report."""
    exchange, config = ThreadExchange(), Config(control_timeout_s=1.0)
    reports: list[dict[str, Any] | None] = []
    errors: list[BaseException] = []

    def one(number: int) -> None:
        try:
            reports.append(run_rank(what, Seat(number, what.world, number), exchange, config, lambda _: None))
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(what.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors, errors
    (report,) = [each for each in reports if each is not None]
    plain: dict[str, Any] = json.loads(json.dumps(report))
    return plain


SPLITS = {
    "tp 2 to tp 2": ({"tp": 2, "block": 4}, {"tp": 2, "block": 4}),
    "tp 4 to tp 1, block 4 to 8, HND to NHD": ({"tp": 4, "block": 4}, {"block": 8, "layout": "NHD"}),
    "tp 1 to tp 4, block 8 to 4": ({"block": 8}, {"tp": 4, "block": 4}),
    "dcp 2 to pp 2": ({"tp": 4, "dcp": 2, "block": 4, "interleave": 2}, {"pp": 2, "block": 4}),
    "pp 2 to dcp 2, NHD": ({"pp": 2, "block": 4, "layout": "NHD"}, {"tp": 2, "dcp": 2, "block": 4, "layout": "NHD"}),
    "2 engines to 2 engines": ({"engines": 2, "block": 4}, {"engines": 2, "block": 4}),
}


@pytest.mark.parametrize("name", SPLITS)
def test_every_byte_of_every_split_arrives(name: str) -> None:
    producer, consumer = SPLITS[name]
    what = scenario(producer=producer, consumer=consumer, fragmentation=0.5)
    report = run_all(what)
    total = report["total"]
    assert (report["verified"], failure_of(report)) == (True, None)
    assert (total["requests"], total["requests_done"], total["wrong_rows"]) == (6, 6, 0)
    assert total["tokens"] == sum(what.lengths())
    # 4 layers, 4 heads of 16 elements of keys and of values, 2 bytes each.
    assert total["nbytes"] == sum(what.lengths()) * 4 * 4 * 2 * 16 * 2
    assert len(report["ranks"]) == what.consumer.engines * what.consumer.ranks
    assert sum(each["ended"].get("done", 0) for each in report["producers"]) == 6 * what.producer.ranks


def test_mla_and_a_poisson_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Outcome] = []

    def report_of(name: str, host: str, ended: Sequence[Outcome], *args: Any, **options: Any) -> Any:  # noqa: ANN401
        outcomes.extend(ended)
        return rank_report(name, host, ended, *args, **options)

    monkeypatch.setattr("kvrdma.bench.cluster.run.rank_report", report_of)
    model = {"layers": 2, "kv_heads": 1, "head_dim": 24, "mla": True}
    arrival = {"kind": "poisson", "rate": 20.0, "concurrency": 3}
    what = scenario(model=model, arrival=arrival, consumer={"tp": 2, "block": 4}, producer={"block": 8})
    report = run_all(what)
    assert report["verified"]
    assert report["total"]["nbytes"] == 2 * sum(what.lengths()) * 2 * 24 * 2
    assert len(outcomes) == 2 * 6
    assert all(each.due_s == what.arrivals_s()[each.request] for each in outcomes)
    assert all(each.began_s >= each.due_s > 0 for each in outcomes), "no request is pulled before it comes"


def test_provoked_failures_end_and_no_byte_is_wrong() -> None:
    failures = {"withdraw": 0.3, "abort": 0.2, "unreachable": 0.1}
    what = scenario(requests=30, failures=failures, producer={"block": 4, "tp": 2}, consumer={"block": 4, "tp": 2})
    fates = Counter(what.fates())
    assert min(fates[name] for name in ("", "withdraw", "abort", "unreachable")) >= 1, fates
    report = run_all(what)
    assert failure_of(report) is None
    assert report["total"]["requests"] == 30
    results = Counter(report["ranks"][0]["results"])
    assert results["done"] >= fates[""]
    assert results["UnreachableError"] + results["PeerUnavailableError"] == fates["unreachable"]
    assert sum(results.values()) == 30


def test_a_producer_that_restarts_in_the_middle_is_met_again() -> None:
    what = scenario(requests=16, failures={"restart": True}, producer={"block": 4, "tp": 2}, consumer={"block": 4})
    report = run_all(what)
    assert failure_of(report) is None
    done = report["ranks"][0]["results"]["done"]
    assert done >= 8, "what came after the restart"
    assert report["ranks"][0]["handshakes"] >= 2


def test_wrong_bytes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write = RankCache.write

    def damage(self: RankCache, request: int, blocks: list[int], tokens: int) -> None:
        write(self, request, blocks, tokens)
        if request == 3:
            self._store[0, blocks[0]].view("u1").reshape(-1)[0] ^= 1

    monkeypatch.setattr(RankCache, "write", damage)
    report = run_all(scenario(producer={"block": 4}, consumer={"block": 4}))
    assert (report["verified"], report["total"]["wrong_rows"]) == (False, 1)
    assert isinstance(failure_of(report), DataError)


def test_what_may_happen_to_a_request() -> None:
    def ended(fate: str, result: str, wrong: int = 0) -> Outcome:
        return Outcome(1, fate, result, 0, 0, 1, wrong_rows=wrong)

    assert not unexpected(ended("", "done"), restart=False)
    assert unexpected(ended("", "LeaseRevokedError"), restart=False)
    assert not unexpected(ended("", "LeaseRevokedError"), restart=True)
    assert not unexpected(ended("withdraw", "LeaseRevokedError"), restart=False)
    assert unexpected(ended("withdraw", "PullTimeoutError"), restart=False)
    assert unexpected(ended("withdraw", "done", wrong=1), restart=True)
    report = {"total": {"wrong_rows": 0, "unexpected": ["x"], "requests": 1}, "scenario": {"requests": 1}}
    assert isinstance(failure_of(report), PullError)
    report["total"] = {"wrong_rows": 0, "unexpected": [], "requests": 0}
    assert "1 requests were never pulled" in str(failure_of(report))


def test_the_model_counts_what_a_real_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, bytes, handshakes and done messages of ``--simulate`` against those of real engines."""
    what = scenario(
        requests=8,
        producer={"engines": 2, "tp": 4, "block": 4},
        consumer={"engines": 2, "tp": 2, "block": 8, "layout": "NHD"},
        prompt={"tokens": 40},
        arrival={"concurrency": 1},
    )
    seen: Counter[str] = Counter()
    answer = Producer.answer

    def counted(self: Producer, message: wire.Message) -> wire.Message:
        seen[type(message).__name__] += 1
        return answer(self, message)

    monkeypatch.setattr(Producer, "answer", counted)
    report = run_all(what)
    traffic = play(Model(what), Links(1e-6, 1e9, 1e-7))
    total = report["total"]
    assert (traffic.rows, traffic.nbytes) == (total["rows"], total["nbytes"])
    assert traffic.handshakes == sum(rank["handshakes"] for rank in report["ranks"]) == seen["DescribeRanks"]
    assert traffic.done_messages == seen["LeaseDone"]
    assert traffic.rows_posted <= traffic.rows


def test_the_model_weighs_a_thousand_engines() -> None:
    group = {"tp": 8, "block": 16}
    what = make_scenario({"producer": group, "consumer": group, "prompt": {"tokens": 256}}, "")
    result = simulate(what, 1000, Links(5e-6, 50e9, 1e-7))["result"]
    assert (result["engines"], result["ranks"], result["requests"]) == (1000, 8000, 4000)
    # A rank reads from one rank of each producer it meets, and 8 requests meet 8 of 500.
    assert result["handshakes_made"] == 500 * 8 * 8
    assert result["done_messages"] == 4000 * 8
    assert result["nbytes"] == 4000 * 256 * 32 * 8 * 2 * 128 * 2
    assert 500 < result["handshake_bytes_per_rank_and_peer"] < 10_000
    assert 1 < result["memory_kb_per_peer"] < 1000
    assert 0 < result["busiest_producer_link"] <= 1


def test_a_modelled_link_serves_one_read_at_a_time() -> None:
    what = scenario(model={"layers": 1, "kv_heads": 1, "head_dim": 16}, requests=4, prompt={"tokens": 16},
                    producer={"block": 16}, consumer={"block": 16}, arrival={"concurrency": 4})  # fmt: skip
    nbytes = 16 * 2 * 16 * 2
    traffic = play(Model(what), Links(0.0, nbytes, 0.0))
    assert traffic.seconds == [1.0, 2.0, 3.0, 4.0], "each read takes a second, and there is one link"
    traffic = play(Model(what), Links(0.0, 1e12, 0.5))
    assert traffic.ended_s == 2.0, "one row each, half a second a row"
    slow = play(Model(what), Links(0.25, 1e12, 0.0))
    assert slow.seconds[0] == pytest.approx(4 * 0.25 + 4 * 0.25, abs=1e-6), "handshake, then two looks and the data"


def test_what_a_link_test_says_is_what_the_model_is_given_and_gives_back() -> None:
    cases = [{"block_bytes": 1 << 20, "nbytes": 64_000_000, "rows": 64, "total_ms": {"median": 8.0}},
             {"block_bytes": 4096, "nbytes": 64_000_000, "rows": 16_000, "total_ms": {"median": 32.0}}]  # fmt: skip
    links = links_of({"cases": cases, "latency": {"percentiles_us": {"50": 10.0}}})
    assert (links.latency_s, links.bytes_per_s, links.row_s) == pytest.approx((5e-6, 8e9, 2e-6))
    for case in cases:
        assert links.service_s(case["rows"], case["nbytes"]) == pytest.approx(case["total_ms"]["median"] * 1e-3)  # type: ignore[index,arg-type]


def test_a_modelled_pull_takes_what_its_plan_costs() -> None:
    """One pull at a time: two looks and the data, by the rows and bytes that a real engine reports for it."""
    values = scenario_values("memory", {"block": 2, "tokens": 64, "concurrency": 1})
    what = make_scenario({**values, "requests": 3}, "of a test")
    (rank,) = run_all(what)["ranks"]
    links = Links(latency_s=1e-3, bytes_per_s=1e9, row_s=1e-4)
    traffic = play(Model(what), links)
    assert rank["nbytes"] == 3 * 64 * 32 * 2048
    assert rank["rows_posted"] * links.row_s > 5 * rank["nbytes"] / links.bytes_per_s, "rows are what takes time"
    first_s = 4 * links.latency_s
    looks_s = 3 * 4 * links.latency_s
    assert sum(traffic.seconds) == pytest.approx(first_s + looks_s + rank["rows_posted"] * links.row_s)
    wide = play(Model(what), Links(latency_s=0.0, bytes_per_s=1e6, row_s=0.0))
    assert wide.seconds == pytest.approx([64 * 32 * 2048 / 1e6] * 3), "and here it is bytes"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"requets": 5}, "of a test: Object contains unknown field `requets`; known: model, producer, .*, verify$"),
        ({"producer": {"typo": 1}}, "producer: .* `typo`; known: engines, tp, dcp, pp, interleave, block, layout$"),
        ({"model": {"layers": 1}}, "model: .* required field `kv_heads`; known: layers, kv_heads, head_dim, dtype"),
        ({"consumer": {"layout": "CPU"}}, "of a test: consumer.layout 'CPU' is unknown: use HND or NHD$"),
        ({"requests": 0}, "of a test: requests 0: Expected `int` >= 1$"),
        ({"transports": ["ucx", 1]}, r"of a test: transports \['ucx', 1\]: Expected `str`, got `int`$"),
        ({"prompt": 5}, "prompt 5: Expected `object`"),
        ({"producer": {"tp": 3}}, "4 kv heads, 3 parts"),
        ({"producer": {"pp": 9}}, "producer.pp 9 exceeds the model's 4 layers"),
        ({"consumer": {"interleave": 3}}, "consumer.interleave 3 does not divide its block of 16"),
        ({"prompt": {"least": 9, "most": 8}}, "prompt.least 9 exceeds prompt.most 8"),
        ({"failures": {"abort": 0.7, "withdraw": 0.7}}, "withdraw 0.7, abort 0.7 and unreachable 0.0 add up to 1.4"),
        ({"fragmentation": 1.5}, "fragmentation 1.5: Expected `float` <= 1.0"),
        ({"model": "gpt-9"}, r"model 'gpt-9' is not in the table .*: give a table: model = \{ layers"),
        ({"model": {"layers": 1, "kv_heads": 1, "head_dim": 3}}, "not a multiple of 8 bytes"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, AssertionError), match=says):
        scenario(**values)


def test_draws_are_the_same_everywhere_and_as_asked() -> None:
    what = scenario(requests=4000, prompt={"kind": "lognormal", "tokens": 100, "most": 10_000, "sigma": 0.5},
                    arrival={"kind": "poisson", "rate": 50.0})  # fmt: skip
    assert what.lengths() == what.lengths()
    assert sum(what.lengths()) / 4000 == pytest.approx(100, rel=0.05)
    assert what.arrivals_s()[-1] == pytest.approx(4000 / 50, rel=0.1)
    assert scenario().arrivals_s() == [0.0] * 6
    assert set(scenario(requests=100).fates()) == {""}


def test_fragmentation_moves_that_share_of_the_blocks() -> None:
    for share, low, high in ((0.0, 0, 0), (0.5, 0.3, 0.7), (1.0, 0.9, 1.0)):
        what = scenario(fragmentation=share, prompt={"tokens": 400}, producer={"block": 4})
        cache = RankCache(what, what.producer, RankId(0, 0), 8)
        ids = cache.slot(0, 400)
        assert len(ids) == 100
        assert low <= sum(i != block for i, block in enumerate(ids)) / 100 <= high


def test_places_and_their_number() -> None:
    what = scenario(producer={"engines": 2, "tp": 2}, consumer={"pp": 2})
    places = [place_of(what, number, 6) for number in range(6)]
    assert [(p.role, p.engine, tuple(p.rank)) for p in places] == [
        ("producer", 0, (0, 0)), ("producer", 0, (0, 1)), ("producer", 1, (0, 0)), ("producer", 1, (0, 1)),
        ("consumer", 0, (0, 0)), ("consumer", 0, (1, 0)),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="5 processes, but the scenario has 6 ranks"):
        place_of(what, 0, 5)


def test_examples_are_scenarios() -> None:
    files = sorted(EXAMPLES.glob("*.toml"))
    assert len(files) >= 3
    for path in files:
        assert load_scenario(path).requests > 0


def test_percentiles_and_nixlbench_columns_are_arithmetic() -> None:
    assert [percentile(list(range(1, 101)), p) for p in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert percentile([3.0], 1) == 3.0
    one = Outcome(1, "", "done", 0, 0, 1, nbytes=4000, rows=40, rows_posted=4, plan_s=1e-6, post_s=2e-6, wait_s=8e-6)
    row = nixlbench_row([one, one])
    assert row == {
        "Block Size (B)": 1000, "Batch Size": 4, "B/W (GB/Sec)": 0.4, "Avg Lat. (us)": 2.5, "Avg Prep (us)": 1.0,
        "P99 Prep (us)": 1.0, "Avg Post (us)": 2.0, "P99 Post (us)": 2.0, "Avg Tx (us)": 10.0, "P99 Tx (us)": 10.0,
    }  # fmt: skip


def test_time_in_which_nothing_moves_does_not_count() -> None:
    spans = [(0.0, 1.0), (0.5, 2.0), (5.0, 6.0), (5.2, 5.4)]
    assert busy_seconds(Outcome(1, "", "done", 0, low, high) for low, high in spans) == pytest.approx(3.0)


def test_counters_of_nics(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    port.mkdir(parents=True)
    (port / "port_rcv_data").write_text("100\n")
    (port / "port_xmit_data").write_text("25\n")
    eth = tmp_path / "sys/class/net/eth0/statistics"
    eth.mkdir(parents=True)
    (eth / "rx_bytes").write_text("7\n")
    (eth / "tx_bytes").write_text("0\n")
    before = nic_bytes(HostView(tmp_path / "sys", tmp_path / "proc"))
    assert before == {"mlx5_0:1": {"received": 400, "sent": 100}, "eth0": {"received": 7, "sent": 0}}
    (port / "port_rcv_data").write_text("300\n")
    after = nic_bytes(HostView(tmp_path / "sys", tmp_path / "proc"))
    assert difference(before, after) == {"mlx5_0:1": {"received": 800, "sent": 0}}


def test_an_exchange_gives_up() -> None:
    exchange = ThreadExchange()
    with pytest.raises(UnreachableError, match=r"'x' did not come within 0\.01 s"):
        exchange.get("x", 0.01)
    with pytest.raises(UnreachableError, match="'n' did not reach 2"):
        wait_count(exchange, "n", 2, 0.01)
    with pytest.raises(ConfigError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: launch it by `torchrun"):
        from_launcher({}, 1.0)


def test_the_command_simulates_and_changes_scenarios(tmp_path: Path) -> None:
    small = ["--set", "prompt.tokens=64", "--set", "model=deepseek-v3"]
    saved = tmp_path / "s.json"
    ended = CliRunner().invoke(main, ["bench", "--simulate", "--engines", "4", "--json", "--save", str(saved), *small])
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout) == json.loads(saved.read_text())
    assert json.loads(ended.stdout)["result"]["nbytes"] == 64 * 64 * 61 * 576 * 2
    for wrong, code in ((["--set", "nothing"], 2), (["--set", "producer.tp=zero"], 2), (["gone.toml"], 2), ([], 2)):
        ended = CliRunner().invoke(main, ["bench", "--json", *wrong], env={"RANK": None})
        assert ended.exit_code == code, ended.output
        assert json.loads(ended.stdout)["code"] == code


@pytest.mark.needs("cma")
def test_other_libraries_run_beside_in_their_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kvrdma's own end for a rival: the same harness; and a library that is not there is said to be missing."""
    from kvrdma.bench.rivals.pair import Contender

    names = {"transport": "cma"}
    found = [
        Contender("kvrdma", sys.executable, "ours", names, names),
        Contender("NIXL", sys.executable, "nixl", {"progress_thread": True}, {"progress_thread": True}),
    ]
    monkeypatch.setattr(rivals, "contenders", lambda *_: found)
    report = run_all(scenario(requests=2, producer={"block": 4}, consumer={"block": 4, "tp": 2}, prompt={"tokens": 40}))
    ours, nixl = report["rivals"]
    assert (ours["name"], ours["readers"], ours["rows"], ours["block_bytes"]) == ("kvrdma", 2, 40, 512)
    assert ours["verified"]
    assert 0 < ours["gb_per_s"]["min"] <= ours["gb_per_s"]["max"]
    assert not nixl["verified"]
    assert "No module named 'nixl'" in nixl["error"]
