"""What the README says of parts by name is so, and its programs run."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrdma.agent import ModelInput
from kvrdma.config import Config
from kvrdma.store import StoreServer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def _rows() -> list[tuple[list[str], str, list[str]]]:
    lines = README.partition("## The parts by name")[2].partition("\n## ")[0].splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("| `")]
    return [
        (re.findall(r"`(.+?)`", parts), re.findall(r"`(.+?)`", module)[0], re.findall(r"`(.+?)`", test))
        for parts, module, _, test in cells
    ]


def test_every_part_is_listed() -> None:
    assert len(_rows()) == 8


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's and torch's, at import
@pytest.mark.parametrize(("parts", "module", "tests"), _rows(), ids=lambda value: str(value)[:40])
def test_a_part_is_where_the_table_says_and_its_test_names_it(parts: list[str], module: str, tests: list[str]) -> None:
    if module == "kvrdma.connector":
        pytest.importorskip("vllm")
    found = importlib.import_module(module)
    texts = "".join((ROOT / test).read_text() for test in tests)
    helpers = "".join(path.read_text() for path in (ROOT / "tests/helpers").glob("*.py"))
    for part in parts:
        assert hasattr(found, part), part
        assert part in texts + helpers, f"{part} is in none of {tests}"


def _programs(section: str) -> list[str]:
    text = README.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.needs("cma")
def test_a_request_is_handed_over_by_the_two_programs(tmp_path: Path) -> None:
    producer, consumer = _programs("Hand over a request")
    (tmp_path / "prefill.py").write_text(producer)
    (tmp_path / "decode.py").write_text(
        consumer + "import pathlib\npathlib.Path('read').write_bytes(caches['layer0'])\n"
    )
    first = subprocess.Popen([sys.executable, "prefill.py"], cwd=tmp_path, stdout=subprocess.PIPE)
    with first:
        second = subprocess.run(
            [sys.executable, "decode.py"],
            cwd=tmp_path,
            stdin=first.stdout,
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert second.returncode == 0, second.stderr
    assert first.returncode == 0
    nbytes = 48 * 8 * 128 * 4  # tokens, kv heads, keys and values, float32
    assert second.stdout.startswith(b"%d bytes in 3 rows by cma" % nbytes)
    caches = np.random.default_rng(7).standard_normal((32, 8, 16, 128), dtype=np.float32)
    read = np.frombuffer((tmp_path / "read").read_bytes(), np.float32).reshape(caches.shape)
    assert np.array_equal(read[[10, 11, 12]], caches[[3, 1, 4]])
    assert not read[:10].any()
    assert not read[13:].any()


@pytest.mark.needs("cma")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, at import
def test_the_agent_of_the_readme_stores_and_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("blake3")
    monkeypatch.setenv("KVRDMA_TRANSPORTS", "cma")
    (program,) = _programs("Keep KV in a store, or hand it to another engine")
    computed: list[int] = []

    class Model:
        def prefill(self, batch: ModelInput, caches: list[Any]) -> Any:  # noqa: ANN401
            computed.append(sum(batch.seq_lens))
            caches[0][:2] = torch.arange(caches[0][:2].numel()).view(caches[0][:2].shape)
            return torch.ones(sum(batch.seq_lens), 4)

    def run(endpoint: str) -> Any:  # noqa: ANN401
        text = re.sub(r"\[\"10\.0\.0\.7:7480\".*?\]", f"[{endpoint!r}]", program)
        assert endpoint in text
        cache = torch.zeros(8, 8, 16, 32)
        names: dict[str, Any] = {
            "model": Model(), "kv_caches": [cache], "input_tokens": torch.arange(32), "seq_lens": [32],
            "slot_mapping": torch.arange(32),
        }  # fmt: skip
        exec(compile(text, "README.md", "exec"), names)
        return cache

    config = Config(transports=("cma",))
    with StoreServer(64 << 20, config) as store:
        first, second = run(str(store.endpoint)), run(str(store.endpoint))
    assert computed == [32], "the second finds all of it"
    assert first[:2].any()
    assert torch.equal(first, second)
