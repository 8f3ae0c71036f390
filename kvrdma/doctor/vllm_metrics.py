"""What a vLLM server has counted: do transfers happen, why are requests recomputed, does anything leak?"""

from __future__ import annotations

import http.client
import math
import re
import threading
import urllib.request
from collections import Counter
from collections.abc import Mapping

from kvrdma.finding import Finding, green, red, yellow

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_OURS = "vllm:kvrdma_"
_TIMEOUT_S = 10.0
"""For the whole answer: a server may send byte by byte."""
_MAX_NBYTES = 32 << 20
_MAX_SAID = 300
_OLD_LEASE_S = 600.0


class Samples:
    """The values of one scrape, summed over engines and ranks."""

    def __init__(self, text: str) -> None:
        self.sums: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        for line in text.splitlines():
            match = _SAMPLE.match(line)
            if not match:
                continue
            name, value = match[1], _value(match[3])
            self.sums[name] += value  # type: ignore[assignment] # counters of floats work
            if name == f"{_OURS}pull_failures_total":
                labels = dict(_LABEL.findall(match[2] or ""))
                self.failures[f"{labels.get('reason', '?')} from {labels.get('peer', '?')}"] += int(value)

    def ours(self, name: str) -> float:
        """Give a counter or gauge of kvrdma's; 0 where there is none."""
        return self.sums.get(f"{_OURS}{name}_total", self.sums.get(f"{_OURS}{name}", 0))

    @property
    def any_ours(self) -> bool:
        """Whether the server has kvrdma's metrics at all."""
        return any(name.startswith(_OURS) for name in self.sums)


def _value(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def examine_server(url: str, timeout_s: float = _TIMEOUT_S) -> list[Finding]:
    """Fetch ``/metrics`` from a vLLM server and read it. Whatever is there instead becomes a finding."""
    address = url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    if not address.startswith(("http://", "https://")):
        return [red("metrics", f"{url!r} is no http URL", "nothing can be read", "give http://HOST:PORT")]
    got = _fetch(address, timeout_s)
    if isinstance(got, str):
        return read_metrics(got)
    kind = f"{type(got).__name__}: " if isinstance(got, http.client.HTTPException) else ""
    text = f"{address}: {kind}{got}"[:_MAX_SAID]
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return [red("metrics", text, "nothing can be read", "is the server up, and is this its port?")]


def _fetch(address: str, timeout_s: float) -> str | Exception:
    """Give the text at an address, or why there is none."""
    got: list[str | Exception] = []

    def fetch() -> None:
        try:
            with urllib.request.urlopen(address, timeout=timeout_s) as answer:  # noqa: S310 - http only
                content = answer.read(_MAX_NBYTES + 1)
                if answer.length and len(content) <= _MAX_NBYTES:
                    raise http.client.IncompleteRead(content, answer.length)
        except (OSError, ValueError, http.client.HTTPException) as error:  # not HTTP, half of it, no address at all
            got.append(error)
        else:
            large = ValueError(f"more than {_MAX_NBYTES >> 20} MiB: these are no metrics")
            got.append(large if len(content) > _MAX_NBYTES else content.decode(errors="replace"))

    # The time-out of a socket begins anew with every byte, so another thread waits, and is left to the process's end.
    thread = threading.Thread(target=fetch, name="kvrdma-metrics", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return got[0] if got else TimeoutError(f"no whole answer within {timeout_s:g} s")


def read_metrics(text: str) -> list[Finding]:
    """Say what the metrics mean.

    Args:
        text: Prometheus' text format.
    """
    samples = Samples(text)
    if not samples.any_ours:
        other = " (it has NixlConnector's: that one is in use)" if "vllm:nixl_" in text else ""
        return [
            red(
                "metrics",
                f"no {_OURS}* metrics{other}",
                "this server does not use kvrdma, or has not finished its start",
                '--kv-transfer-config \'{"kv_connector": "KvRdmaConnector", ...}\'; not with --disable-log-stats',
            )
        ]
    return [_transfers(samples), *_not_loaded(samples), *_failures(samples), *_held(samples)]


def _transfers(samples: Samples) -> Finding:
    pulls, loaded = samples.ours("pull_seconds_count"), samples.ours("requests_loaded")
    published, without = samples.ours("leases_done"), samples.ours("requests_without_params")
    if loaded or (pulls and not samples.failures):
        seconds = samples.ours("pull_seconds_sum") / pulls if pulls else 0.0
        nbytes = samples.ours("pull_bytes_sum")
        read_s = samples.ours("read_seconds_sum")
        rate = f", {nbytes / read_s / 1e9:.2f} GB/s while reading" if read_s else ""
        text = f"{loaded:.0f} requests pulled in {pulls:.0f} pulls of ranks, {seconds * 1e3:.1f} ms each{rate}"
        return green("transfers", text)
    if published:
        return green("transfers", f"{published:.0f} publications were read by consumers")
    if samples.failures:
        return red(
            "transfers",
            f"none; {samples.failures.total()} pulls of ranks failed",
            "no request got its prompt from a producer: see failed pulls",
            "docs/troubleshooting.md has each reason with its cure",
        )
    if without:
        return red(
            "transfers",
            f"none; {without:.0f} requests named no producer",
            "every prompt is computed here as if there were no prefill server",
            "the proxy has to pass kv_transfer_params of the prefill answer on to the decode request",
        )
    expired = samples.ours("leases_expired")
    if expired:
        return red(
            "transfers",
            f"none; {expired:.0f} publications expired unread",
            "consumers do not come: blocks are held for nothing",
            "does the proxy send the decode request, and can the decode host reach this one (doctor --peer)?",
        )
    return yellow("transfers", "none yet", "no request has come with a producer", "send one through the proxy")


_REASONS: Mapping[str, tuple[str, str]] = {
    "requests_malformed": ("their kv_transfer_params cannot be used", "the proxy must pass them on unchanged"),
    "requests_declined": ("nothing was worth pulling: cached here, or too short", "none, where prompts repeat"),
    "requests_not_offered": ("every lease was taken when they finished", "raise KVRDMA_FENCE_SLOTS"),
}  # fmt: skip


def _not_loaded(samples: Samples) -> list[Finding]:
    found = []
    for name, (why, fix) in _REASONS.items():
        count = samples.ours(name)
        if count:
            found.append(yellow("recomputed", f"{count:.0f} {name.replace('_', ' ')}", why, fix))
    without, loaded = samples.ours("requests_without_params"), samples.ours("requests_loaded")
    if without and (loaded or samples.failures):
        text = f"{without:.0f} requests, beside {loaded:.0f} that were loaded"
        why = "they came without kv_transfer_params: warm-up and direct requests do"
        found.append(yellow("recomputed", text, why, "look at the proxy"))
    return found


def _failures(samples: Samples) -> list[Finding]:
    found = []
    if samples.failures:
        text = ", ".join(f"{count} {name}" for name, count in samples.failures.most_common(8))
        why = "those requests were recomputed, or failed (kv_load_failure_policy)"
        found.append(yellow("failed pulls", text, why, "docs/troubleshooting.md has each reason with its cure"))
    if rejections := samples.ours("fence_rejections"):
        why = "the producer had ended the lease before the data was there: the fence refused stale bytes"
        found.append(yellow("fence", f"{rejections:.0f} rejections", why, "raise KVRDMA_LEASE_S on the producer"))
    if open_now := samples.ours("breakers_open"):
        why = "they failed repeatedly and are left alone for a while: their requests are recomputed at once"
        found.append(red("breakers", f"{open_now:.0f} producers", why, "kvrdma doctor --peer to each; is it up?"))
    return found or [green("failed pulls", "none")]


def _held(samples: Samples) -> list[Finding]:
    """Look for what is held although nothing goes on."""
    held, stuck = samples.ours("leases_held"), samples.ours("quarantined_pulls")
    busy = sum(samples.sums.get(f"vllm:num_requests_{name}", 0) for name in ("running", "waiting"))
    found = []
    oldest_s = samples.ours("oldest_lease_seconds")
    if oldest_s > _OLD_LEASE_S:
        why = "a consumer renews it and never finishes, or the lease is far too long: its blocks are lost meanwhile"
        found.append(
            red("leases", f"oldest {oldest_s:.0f} s", why, "find the consumer in the log; lower KVRDMA_LEASE_S")
        )
    elif held and not busy:
        why = "no request runs: consumers have still to come, or have not said that they are done"
        found.append(yellow("leases", f"{held:.0f} held, no request running", why, "they end after KVRDMA_LEASE_S"))
    if stuck:
        why = "a transport has not answered after its deadline: the blocks of those pulls are not used again"
        found.append(yellow("quarantine", f"{stuck:.0f} pulls", why, "the peer hangs, or the link: doctor --peer"))
    age = f", oldest {oldest_s:.0f} s" if oldest_s else ""
    return found or [green("leases", f"{held:.0f} held{age}, {busy:.0f} requests in the server")]
