"""`kvrdma doctor`: why do transfers not work, or why are they slow?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.markup import escape

from kvrdma import __version__
from kvrdma.cli.exits import JsonCommand, run
from kvrdma.cli.terminal import Terminal
from kvrdma.config import Config
from kvrdma.doctor.checks import examine
from kvrdma.doctor.peer import examine_peer
from kvrdma.doctor.vllm_metrics import examine_server
from kvrdma.errors import KVRDMAError
from kvrdma.finding import Finding
from kvrdma.host import HostView
from kvrdma.sidechannel import Endpoint

_EPILOG = """\b
Examples:
  kvrdma doctor                                  this host
  kvrdma doctor --json | jq '.findings[] | select(.level != "green")'
  kvrdma doctor --peer prefill0:7471             and the way to a `kvrdma link-test serve`
  kvrdma doctor --metrics http://decode0:8000    and what a vLLM server has counted
  kvrdma doctor --sysfs copy/sys --proc copy/proc   a saved tree of another host

\b
Exit codes:
  0    nothing is red
  1    something is red
  2    wrong options or settings
  74   the output cannot be written
  130  interrupted
  141  the reader of the output has gone
"""
_MARKS = {"green": "[green]●[/]", "yellow": "[yellow]▲[/]", "red": "[red]✖[/]"}


@click.command(cls=JsonCommand, epilog=_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object on stdout.")
@click.option("--peer", metavar="HOST:PORT", help="Also look at the way to a `kvrdma link-test serve` there.")
@click.option("--metrics", metavar="URL", help="Also read a vLLM server's metrics.")
@click.option("--sysfs", type=click.Path(path_type=Path, exists=True), help="A saved /sys; only read, nothing tried.")
@click.option("--proc", type=click.Path(path_type=Path, exists=True), help="The saved /proc that belongs to it.")
@click.option("--quiet", is_flag=True, help="Leave out what is green.")
def doctor(
    peer: str | None, metrics: str | None, sysfs: Path | None, proc: Path | None, *, as_json: bool, quiet: bool
) -> None:
    """Check this host for KV transfers: what is there, what is wrong, and what fixes it.

    green: good. yellow: works, but slow or by luck. red: does not work.
    """
    if (sysfs is None) != (proc is None):
        raise click.UsageError("--sysfs and --proc belong together: give both or neither")
    host = HostView.saved(sysfs, proc) if sysfs and proc else HostView()

    def work() -> KVRDMAError | None:
        findings = examine(host)
        if peer:
            findings += examine_peer(host, Endpoint.parse(peer), Config.from_env())
        if metrics:
            findings += examine_server(metrics)
        shown = [finding for finding in findings if not (quiet and finding.level == "green")]
        show(shown, as_json=as_json)
        if not as_json:
            click.echo(_summary(findings))
        reds = [finding.check for finding in findings if finding.level == "red"]
        return KVRDMAError(f"{len(reds)} red: {', '.join(reds)}") if reds else None

    run("doctor", work, as_json=as_json)


def _summary(findings: Sequence[Finding]) -> str:
    """Count the findings, and say what that means."""
    counts = Counter(finding.level for finding in findings)
    if counts["red"]:
        verdict = "what is red must be fixed"
    elif counts["yellow"]:
        verdict = "works as it is; look at what is yellow"
    else:
        verdict = "all is well"
    return f"{counts['green']} green, {counts['yellow']} yellow, {counts['red']} red: {verdict}"


def show(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print the findings."""
    if as_json:
        healthy = all(finding.level != "red" for finding in findings)
        report = {"kvrdma": __version__, "healthy": healthy, "findings": [asdict(each) for each in findings]}
        click.echo(json.dumps(report))
        return
    console = Terminal(soft_wrap=True, highlight=False)
    for each in findings:
        console.print(f"{_MARKS[each.level]} [bold]{escape(each.check)}[/]: {escape(each.found)}")
        if each.why:
            console.print(f"    why: {escape(each.why)}", style="dim")
        if each.fix:
            console.print(f"    fix: {escape(each.fix)}")
