"""The architecture of DESIGN.md holds in the tree and in the wheel."""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvrdma.transport import installed_transports

ROOT = Path(__file__).parent.parent
LAYERS = [
    {"errors"},
    {
        "config",
        "topology",
        "layout",
        "page_format",
        "wire",
        "rows",
        "blob",
        "finding",
        "host",
        "blocks",
        "models",
        "strides",
        "token_shares",
        "compiled",
        "thread_start",
    },
    {
        "transport",
        "memory",
        "plan",
        "reshape",
        "lease",
        "handshake",
        "mailbox",
        "reference",
        "inflight",
        "sidechannel",
        "breaker",
        "stats",
    },
    {"engine"},
    {"store"},
    {"agent", "aggregator", "connector", "bench", "cli", "doctor", "testing", "__main__"},
]
NATIVE = [("kvrdma_cma", "_cma"), ("kvrdma_ucx", "_ucx"), ("kvrdma_verbs", "_chains"), ("kvrdma_verbs", "_verbs")]
OPTIONAL = {"_verbs"}
"""Built only where the headers of libibverbs are."""


def _layer(module: str) -> int:
    return next(level for level, names in enumerate(LAYERS) if module in names)


def _python_files(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, folder
    return files


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _part_of(path: Path) -> str:
    return path.relative_to(ROOT / "kvrdma").with_suffix("").parts[0]


@pytest.mark.parametrize("path", _python_files("kvrdma"), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_part_imports_a_later_layer(path: Path) -> None:
    part = _part_of(path)
    if part == "__init__":
        return
    for name in _imports(path):
        if name.startswith("kvrdma.") and name.split(".")[1] in {n for layer in LAYERS for n in layer}:
            used = name.split(".")[1]
            assert _layer(used) <= _layer(part), f"{path.name} ({part}) imports {used}"


def test_every_part_has_a_layer() -> None:
    parts = {_part_of(path) for path in _python_files("kvrdma")} - {"__init__"}
    assert parts <= {name for layer in LAYERS for name in layer}


def test_only_the_connector_imports_vllm() -> None:
    for path in _python_files("kvrdma") + _python_files("transports"):
        if _part_of_any(path) != "connector":
            found = [n for n in _imports(path) if n.split(".")[0] == "vllm"]
            assert not found or "bench" in path.parts, f"{path} imports {found}"


def _part_of_any(path: Path) -> str:
    return _part_of(path) if path.is_relative_to(ROOT / "kvrdma") else ""


def test_no_torch_in_transports() -> None:
    for path in _python_files("transports"):
        assert not any(n.split(".")[0] in {"torch", "cupy"} for n in _imports(path)), path
    for path in [*(ROOT / "transports").rglob("*.cpp"), *(ROOT / "transports").rglob("*.hpp")]:
        assert "#include <torch" not in path.read_text(), path


def test_kvrdma_never_names_a_transport() -> None:
    names = set(installed_transports()) - {"memory", "verbs"}  # also ordinary words
    assert names == {"cma", "ucx"}
    for path in _python_files("kvrdma"):
        assert not any(n.startswith("kvrdma_") for n in _imports(path)), path
        if "rivals" in path.parts:
            continue  # other systems have transports of these names
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in names, f"{path}:{node.lineno} names {node.value!r}"


def _module_name(path: Path) -> str:
    folder = "kvrdma" if path.is_relative_to(ROOT / "kvrdma") else "transports"
    parts = path.relative_to(ROOT if folder == "kvrdma" else ROOT / "transports").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_importing_has_no_effect() -> None:
    """No UCX, CUDA, torch, thread or environment variable appears when every module is imported."""
    special = {"__main__", "contract", "connector"}
    names = [_module_name(path) for path in _python_files("kvrdma") + _python_files("transports")]
    names = [name for name in names if not any(part.split("_")[0] in special for part in name.split("."))]
    assert {"kvrdma.engine.core", "kvrdma.testing.fault", "kvrdma_ucx.library"} <= set(names)
    script = f"""
        import os, sys, threading, importlib
        before = dict(os.environ)
        for name in {names!r}:
            importlib.import_module(name)
        assert threading.active_count() == 1, threading.enumerate()
        assert dict(os.environ) == before
        loaded = open("/proc/self/maps").read()
        for name in ("libucp", "libucs", "libcuda", "libtorch"):
            assert name not in loaded, name
        assert not {{"torch", "cupy", "vllm"}} & set(sys.modules), "imported at once"
    """
    lines = "\n".join(line[8:] for line in script.splitlines())
    ended = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(("package", "native"), NATIVE)
def test_fresh_stub_equals_committed_stub(package: str, native: str, tmp_path: Path) -> None:
    module = f"{package}.{native}"
    if native in OPTIONAL and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} was not built: there are no headers of libibverbs here")
    loader = "import kvrdma_ucx.library as library; library.load(); " if package == "kvrdma_ucx" else ""
    out = tmp_path / "fresh.pyi"
    script = f"{loader}from nanobind.stubgen import main; main(['-q', '-m', {module!r}, '-o', {str(out)!r}])"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    committed = ROOT / "transports" / package / f"{native}.pyi"
    assert out.read_text() == committed.read_text(), f"regenerate {committed.name}"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(ROOT),
    ]
    with (ROOT / "pyproject.toml").open() as lock:  # two test processes would build in the same folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_wheel_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for path in _python_files("kvrdma"):
        assert str(path.relative_to(ROOT)) in names
    for package in ("kvrdma_memory", "kvrdma_cma", "kvrdma_ucx", "kvrdma_verbs"):
        assert f"{package}/__init__.py" in names
        assert f"{package}/py.typed" in names
    for package, module in NATIVE:
        built = sum(n.startswith(f"{package}/{module}.") and n.endswith(".so") for n in names)
        assert built == 1 or (built == 0 and module in OPTIONAL)
        assert f"{package}/{module}.pyi" in names
    assert "kvrdma/reshape/reshape.cu" in names
    strays = [n for n in names if n.endswith((".cpp", ".hpp", "CMakeLists.txt")) or n.startswith("tests")]
    assert strays == []
    tops = {n.split("/")[0] for n in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {
        "kvrdma",
        "kvrdma_memory",
        "kvrdma_cma",
        "kvrdma_ucx",
        "kvrdma_verbs",
    }


@pytest.mark.slow
def test_plain_install_on_a_bare_host(wheel: Path, tmp_path: Path) -> None:
    """Without any extra: small, no torch, the link test works, and what is missing names its extra."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = str(venv / "bin/python")
    subprocess.run([python, "-m", "pip", "install", "-q", str(wheel)], check=True, capture_output=True)
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"], check=True, capture_output=True, text=True
    )
    assert {line.split("==")[0].lower() for line in listed.stdout.split()} <= {
        *("kvrdma", "numpy", "msgspec", "pyzmq", "click", "rich"),
        *("markdown-it-py", "mdurl", "pygments", "pip", "setuptools"),
    }
    link = [python, "-m", "kvrdma", "link-test", "--json", "--nbytes", "1MiB", "--iters", "2"]
    ended = subprocess.run(link, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert '"verified": true' in ended.stdout.replace('":true', '": true')
    ended = subprocess.run(
        [*link, "--transport", "ucx"], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    if "libucp.so.0" not in subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout:
        assert ended.returncode != 0
        assert "kvrdma[ucx]" in ended.stderr
