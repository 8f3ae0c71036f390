"""Every command line that the documents, examples, scripts and messages show is one that the program accepts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml  # type: ignore[import-untyped,unused-ignore]

from kvrdma.bench.cluster.scenario import load_scenario
from kvrdma.cli import _COMMANDS, main
from kvrdma.cli.bench import bench, read_scenario

ROOT = Path(__file__).parents[2]
NAMES = "|".join(_COMMANDS)
DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "docs/benchmarks.md",
    "docs/troubleshooting.md",
    "kvrdma/connector/README.md",
    "transports/README.md",
]
SOURCES = ["kvrdma/**/*.py", "transports/*/*.py", "examples/bench/*", "scripts/*"]
SCENARIO = "examples/bench/two-nodes.toml"


def _texts() -> Iterator[str]:
    files = [ROOT / name for name in DOCUMENTS]
    files += [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern)) if path.is_file()]
    for path in files:
        yield re.sub(r" \\+\n\s*", " ", path.read_text())


def _examples() -> list[str]:
    """Give what follows ``kvrdma `` at the beginning of a line, without comments and what else belongs to the shell."""
    found = [line for text in _texts() for line in re.findall(rf"^\s*kvrdma ((?:{NAMES})\b.*)$", text, re.MULTILINE)]
    return sorted({re.split(r"\s{2,}|\s[#|>]|;", line.strip())[0] for line in found})


def _mentions() -> list[str]:
    """Give what stands in backquotes: perhaps without arguments and values."""
    return sorted({line for text in _texts() for line in re.findall(rf"`kvrdma ((?:{NAMES})\b[^`\n\"]*)`", text)})


def _parse(command: click.Command, words: list[str], name: str) -> None:
    """Parse as click does, without running anything."""
    with command.make_context(name, list(words)) as context:
        rest = [*context._protected_args, *context.args]
        if isinstance(command, click.Group) and rest:
            _, below, arguments = command.resolve_command(context, rest)
            assert below is not None, f"no command {rest[0]}"
            _parse(below, arguments, rest[0])


@pytest.mark.parametrize("line", _examples())
def test_an_example_is_accepted(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.json", "b.json", "run.json", "today.json", "yesterday.json"):
        Path(name).write_text("{}")
    for name in ("sys", "proc"):
        Path("copy", name).mkdir(parents=True)
    _parse(main, shlex.split(line), "kvrdma")


@pytest.mark.parametrize("line", _mentions())
def test_a_mention_names_a_command_and_its_options(line: str) -> None:
    command: click.Command | None = main
    for word in line.replace("|", " ").split():
        if word.startswith("--"):
            assert command is not None
            assert word in {name for option in command.params for name in option.opts}, f"{word} of {line}"
        elif isinstance(command, click.Group) and (below := command.get_command(click.Context(command), word)):
            command = below
    assert command is not main


def test_commands_are_found() -> None:
    assert {"doctor --quiet", "link-test serve --bind 0.0.0.0:7471", "report run.json"} <= set(_examples())
    assert {"link-test serve", "store serve|stats"} <= set(_mentions())
    with pytest.raises(click.UsageError):
        _parse(main, ["doctor", "--no-such-option"], "kvrdma")


def _launches() -> dict[str, str]:
    """Give each way to launch a benchmark, as one line."""
    job = list(yaml.safe_load_all((ROOT / "examples/bench/kubernetes.yaml").read_text()))[1]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    shell, option, script = container["command"]
    assert (shell, option) == ("sh", "-c")
    texts = {"kubernetes.yaml": script}
    for name in ("README.md", SCENARIO, "scripts/bench-two-node", "scripts/slurm.sbatch", "kvrdma/cli/bench.py"):
        texts[name] = re.sub(r" \\+\n\s*", " ", (ROOT / name).read_text())
    launch = re.compile(r"(?:torchrun|torch\.distributed\.run) (.*-m kvrdma\.bench\b.*)")
    found = {name: launch.findall(text)[-1] for name, text in texts.items()}
    return {**found, "README.md, one host": launch.findall(texts["README.md"])[0]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("where", "line"), _launches().items(), ids=_launches())
def test_a_launch_is_accepted(where: str, line: str) -> None:
    run = pytest.importorskip("torch.distributed.run")
    line = (
        re.sub(r"\$(\{?\w+(?::-\d+)?\}?|@)", "1", line.replace("\\", "")).replace("...", "").replace("FILE", SCENARIO)
    )
    launcher, _, ours = line.partition(" -m kvrdma.bench")
    options = run.get_args_parser().parse_args([*shlex.split(launcher), "-m", "kvrdma.bench"])
    assert options.nproc_per_node in ("1", "2"), where
    words = [word for word in shlex.split(ours) if word != "1"]  # "$@"
    with bench.make_context("bench", words) as context:
        scenario = read_scenario(ROOT / (context.params["scenario_file"] or SCENARIO), ())
    assert scenario.requests > 0


def test_the_job_of_kubernetes_has_the_ranks_of_its_scenario() -> None:
    service, job = yaml.safe_load_all((ROOT / "examples/bench/kubernetes.yaml").read_text())
    pods = job["spec"]["completions"]
    assert pods == job["spec"]["parallelism"] == 2
    pod = job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    launch = _launches()["kubernetes.yaml"]
    assert f"--master-addr {name}-0.{pod['subdomain']} " in launch, "the host name of the first pod of an indexed Job"
    assert '--node-rank "$JOB_COMPLETION_INDEX"' in launch
    (ranks,) = re.findall(r"--nproc-per-node (\d+)", launch)
    scenario = load_scenario(ROOT / SCENARIO)
    assert pods * int(ranks) == scenario.producer.ranks + scenario.consumer.ranks
