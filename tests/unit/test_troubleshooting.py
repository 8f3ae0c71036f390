"""The page of errors, held against the source: every message is explained by a row, and no row explains nothing.

A message is found where its error is made. What is put into it counts as ``…``, the sides of a condition follow one
another. An example on the page explains a message if it occurs in it; its own ``…`` stands for any text.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from kvrdma import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
CLASSES = {name for name, kind in vars(errors).items() if isinstance(kind, type) and kind.__module__ == errors.__name__}

ANY = "…"
CATCH_ALL = "anything else"
TOKEN = re.compile(r'\s+|"((?:[^"\\]|\\.)*)"|.', re.DOTALL)

# What makes messages without naming the class, by the place: a function's last text, or what a function returns.
CARRIERS = {
    ("kvrdma/config.py", "ValueError"): ("KVRDMA_…: ", "ConfigError"),
    ("kvrdma/config.py", "TypeError"): ("KVRDMA_…: ", "ConfigError"),
    ("kvrdma/page_format.py", "_unknown"): ("", "LayoutError"),
    ("transports/kvrdma_cma/denied.py", "append"): ("", "PeerPermissionError"),
    ("kvrdma/compiled.py", "return"): ("", "TransportUnavailableError"),
}
# The same in C++: what goes before a text, how it continues, and the classes whose message that is.
OF_UCX = ("PeerLostError", "TransportError", "NotOneSidedError")
NATIVE_CARRIERS: dict[str, tuple[str, tuple[str, ...]]] = {
    r"\bfail_read\(": ("read … of … ", OF_UCX),
    r"\bfailure_of\(status, name": ("", OF_UCX),
    r"\blose\(": ("", ("PeerLostError",)),
    r"\blost =": ("", ("PeerLostError",)),
    r"->why =": ("", ("PeerLostError",)),
    r"\bstale =": ("", ("StaleRegionError",)),
    r"\bcancel\(": ("", ("ReadCancelledError",)),
    r"\bsnprintf\(text, sizeof text, (?=\"\[)": ("", ("RegistrationError",)),
    r"\bsnprintf\(where, sizeof where, (?=\"UCX)": ("", ("RegistrationError",)),
    r"    return (?=\"has restarted)": ("peer … ", ("PeerIdentityError",)),
    r"    return (?=\"(?:speaks|has no) )": ("peer … ", ("ConnectError",)),
}


# Classes with a row for anything else, and how many messages it stands for: read, and wrong arguments all of them.
FOR_PROGRAMMERS = {"ReshapeError": 29}

# Places with no words of their own, by file: they pass on what another place, an exception or the system says.
PASS_ON = {
    "kvrdma/agent/config.py": 2,  # msgspec: a value of the wrong type; ``check_kind`` of ``kvrdma.page_format``
    "kvrdma/bench/cluster/scenario.py": 2,  # a file, and msgspec
    "kvrdma/cli/report.py": 1,  # a file that cannot be written
    "kvrdma/compiled.py": 3,  # two functions that make no message, and ``without``, which is found where it is given
    "kvrdma/config.py": 2,  # its own ValueError and TypeError
    "kvrdma/connector/options.py": 1,  # ``parse_setting`` of ``kvrdma.config``
    "kvrdma/sidechannel/client.py": 1,  # the peer's name before a message of ``kvrdma.wire``
    "kvrdma/sidechannel/endpoint.py": 1,  # ``host_and_port`` of ``kvrdma.config``
    "kvrdma/store/port.py": 1,  # ``groups_of`` of ``kvrdma.reference``, with the prompt before it
    "transports/kvrdma_cma/core.cpp": 1,  # ``cancel``
    "transports/kvrdma_cma/transport.py": 1,  # ``denied.explain``
    "transports/kvrdma_cma/worker.cpp": 6,  # ``lose``, ``stale``, and the kernel's word for process_vm_readv
    "transports/kvrdma_memory/__init__.py": 1,  # why reads are cancelled
    "transports/kvrdma_ucx/src/cuda.cpp": 1,  # ``refuse``
    "transports/kvrdma_ucx/src/endpoint.cpp": 1,  # what ``fail`` and ``close`` were given
    "transports/kvrdma_ucx/src/regions.cpp": 1,  # ``text``
    "transports/kvrdma_verbs/src/peer.cpp": 1,  # what ``end`` was given
    "transports/kvrdma_verbs/src/peer_wireup.cpp": 3,  # ``why_not``
    "transports/kvrdma_verbs/src/wireup.cpp": 5,  # ``refuse``, and system calls in brackets behind an address
    "transports/kvrdma_verbs/src/worker.cpp": 1,  # ``watch``
    "transports/native/rows.hpp": 1,  # ``refuse``
}


@dataclass(frozen=True)
class Message:
    """What one place in the source may say."""

    error: str
    text: str
    where: str

    @property
    def says_nothing(self) -> bool:
        return len(re.findall(r"[A-Za-z_-]{2,}", self.text)) < 2


class PythonFile:
    """The messages of one file."""

    def __init__(self, path: Path, root: Path = ROOT) -> None:
        self.name = str(path.relative_to(root))
        self.tree = ast.parse(path.read_text())
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def messages(self) -> Iterator[Message]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and node.args:
                name = _name(node.func)
                texts = self.texts(node.args[-1 if name == "_unknown" else 0])
            elif isinstance(node, ast.Return) and node.value:
                name, texts = "return", [self.text(node.value)]
            else:
                continue
            before, error = CARRIERS.get((self.name, name), ("", name))
            if error in CLASSES:
                lines = (re.sub(rf"{ANY}+", ANY, f"{before}{text}".replace("\n", " ")) for text in texts)
                yield from (Message(error, line, f"{self.name}:{node.lineno}") for line in lines)

    def texts(self, node: ast.expr) -> list[str]:
        """Each text that an argument may be: those of a variable, or those that a function of this file returns."""
        values: list[ast.expr] = []
        if isinstance(node, ast.Name | ast.Attribute):
            values = self.assigned(node)
        elif isinstance(node, ast.Call):
            values = self.returned.get(_name(node.func), [])
        return [
            self.text(value) for value in values or [node] if not (isinstance(value, ast.Constant) and not value.value)
        ]

    def text(self, node: ast.expr, depth: int = 0) -> str:  # noqa: PLR0911 - one for each kind of expression
        """Give what an expression says: fixed text, and ``…`` for the rest."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else ANY
        if isinstance(node, ast.JoinedStr):
            return "".join(self.text(part, depth) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self.text(node.value, depth)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.text(node.left, depth) + self.text(node.right, depth)
        if isinstance(node, ast.IfExp):
            return self.text(node.body, depth) + ANY + self.text(node.orelse, depth)
        if isinstance(node, ast.Name) and depth < 3:
            values = [self.text(value, depth + 1) for value in self.assigned(node)]
            return ANY.join(values) or ANY
        if isinstance(node, ast.Call):
            parts = [each for each in node.args if not isinstance(each, ast.Constant)]
            return ANY + ANY.join(self.text(each, depth) for each in parts) + ANY
        if isinstance(node, ast.List):
            return ANY.join(self.text(each, depth) for each in node.elts)
        return ANY

    def assigned(self, wanted: ast.Name | ast.Attribute) -> list[ast.expr]:
        """What is assigned to a name in its function or module, or to an attribute anywhere in the file."""
        near = self.assignments.get((self.scope(wanted), _name(wanted)))
        return near or self.assignments.get((self.tree, _name(wanted)), [])

    def scope(self, node: ast.AST) -> ast.AST:
        """Give the function or module whose name a node is; an attribute is the module's."""
        if isinstance(node, ast.Attribute):
            return self.tree
        while not isinstance(node, ast.FunctionDef | ast.Module):
            node = self.parents[node]
        return node

    @cached_property
    def assignments(self) -> dict[tuple[ast.AST, str], list[ast.expr]]:
        found: dict[tuple[ast.AST, str], list[ast.expr]] = {}
        texts = ast.Constant | ast.JoinedStr | ast.BinOp | ast.IfExp
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, texts):
                for target in node.targets:
                    found.setdefault((self.scope(target), _name(target)), []).append(node.value)
        return found

    @cached_property
    def returned(self) -> dict[str, list[ast.expr]]:
        functions = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)]
        return {f.name: [n.value for n in ast.walk(f) if isinstance(n, ast.Return) and n.value] for f in functions}


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def native_messages(path: Path, root: Path = ROOT) -> Iterator[Message]:
    """Find what follows the name of a class, or a carrier, up to the end of the call or braces it is in."""
    source = re.sub(r"//.*", "", path.read_text())
    carriers = dict(NATIVE_CARRIERS)
    if own := re.search(r"\brefuse\b.{0,300}?StatusError\(\"(\w+)\"", source, re.DOTALL):
        carriers[r"\brefuse\("] = ("", (own[1],))
    named = re.finditer(r'(?:\?\s*"(\w+Error)"\s*:\s*)?"(\w+Error)"\s*,', source)
    found: list[tuple[int, tuple[str | Any, ...], str]] = [
        (hit.start(), hit.groups(), _literals(source, hit.end())) for hit in named
    ]
    for carrier, (before, kinds) in carriers.items():
        for hit in re.finditer(carrier, source):
            text = _literals(source, hit.end()).lstrip(ANY)
            if re.search("[a-z]", text):  # else it is the carrier's own definition
                found.append((hit.start(), kinds, before + text))
    for start, kinds, text in found:
        where = f"{path.relative_to(root)}:{source.count(chr(10), 0, start) + 1}"
        yield from (Message(kind, text, where) for kind in kinds if kind in CLASSES)


def _literals(source: str, start: int) -> str:
    """Join the texts from ``start`` to the bracket or semicolon that ends what it is in."""
    text, depth, at = "", 0, start
    while depth >= 0:
        token = TOKEN.match(source, at)
        assert token
        at = token.end()
        if token[1] is not None:
            text += re.sub(r"%[\w.]+", ANY, token[1])
        elif token[0] == ";":
            break
        elif not token[0].isspace():
            depth += (token[0] in "({[") - (token[0] in ")}]")
            text += ANY if not text.endswith(ANY) else ""
    return text


def find_messages() -> list[Message]:
    """List what is raised; nobody but a test's author sees what ``kvrdma.testing`` and the stress programs say."""
    python = [path for folder in ("kvrdma", "transports") for path in (ROOT / folder).rglob("*.py")]
    native = [path for pattern in ("*.cpp", "*.hpp") for path in (ROOT / "transports").rglob(pattern)]
    found = [m for path in python if path.parent.name != "testing" for m in PythonFile(path).messages()]
    found += [m for path in native if path.stem != "stress" for m in native_messages(path)]
    return [m for m in found if m.error != "KVRDMAError"]  # the base: in the text below the tables


MESSAGES = find_messages()


def find_rows() -> Iterator[tuple[str, str]]:
    """Give the class and the second cell of each row."""
    error = ""
    for line in PAGE.partition("## Known from the field")[0].splitlines():
        row = re.fullmatch(r"\| (?:`(\w+Error)` )?\| (.*?) \| .+ \| .+ \|", line)
        if row and row[2] != "says, for example":
            error = row[1] or error
            yield error, row[2]


ROWS = list(find_rows())
EXAMPLES = [(error, example) for error, cell in ROWS for example in re.findall(r"`([^`]+)`", cell)]


def explains(example: str, text: str) -> bool:
    return re.search(".*".join(map(re.escape, example.split(ANY))), text, re.DOTALL) is not None


def unexplained(messages: Iterable[Message]) -> list[Message]:
    return [
        message
        for message in messages
        if not message.says_nothing
        and not any(error == message.error and explains(example, message.text) for error, example in EXAMPLES)
    ]


def test_every_message_is_explained() -> None:
    left = [message for message in unexplained(MESSAGES) if message.error not in FOR_PROGRAMMERS]
    assert not left, "no row of docs/troubleshooting.md explains:\n" + "\n".join(
        f"{m.where}: {m.error}: {m.text}" for m in left
    )


def test_a_message_that_no_row_explains_is_noticed(tmp_path: Path) -> None:
    python, native = tmp_path / "new.py", tmp_path / "new.cpp"
    python.write_text("""def load(path, most):
    why = f"{path} is stale" if path else "no path"
    if most > LIMIT:
        raise errors.PullError(f"the moon is {most} km " + "away: wait")
    raise ConnectError(f"peer {most!r}: {why}")
""")
    native.write_text("""// "PullError", "a remark"
    if (bad) throw StatusError(gone ? "PeerLostError" : "ConnectError",
                               name() + ": the moon is " + std::to_string(most) +
                                   " km away", errno);
""")
    found = [*PythonFile(python, tmp_path).messages(), *native_messages(native, tmp_path)]
    assert sorted((m.error, m.text, m.where) for m in found) == [
        ("ConnectError", "peer …: … is stale…no path", "new.py:5"),
        ("ConnectError", "…: the moon is … km away…", "new.cpp:2"),
        ("PeerLostError", "…: the moon is … km away…", "new.cpp:2"),
        ("PullError", "the moon is … km away: wait", "new.py:4"),
    ]
    assert sorted(unexplained(found), key=str) == sorted(found, key=str)


def test_what_only_a_programmer_causes_was_looked_at() -> None:
    """Their classes have a row for anything else. Whoever adds a message looks whether it is true of that one, too."""
    assert {error for error, cell in ROWS if cell == CATCH_ALL} == set(FOR_PROGRAMMERS)
    assert Counter(m.error for m in unexplained(MESSAGES) if m.error in FOR_PROGRAMMERS) == FOR_PROGRAMMERS


def test_what_passes_messages_on_was_looked_at() -> None:
    """A place whose text is made elsewhere: that place must be read, too (``CARRIERS``)."""
    assert Counter(m.where.partition(":")[0] for m in MESSAGES if m.says_nothing) == PASS_ON


@pytest.mark.parametrize(("error", "example"), EXAMPLES)
def test_every_example_is_of_a_message(error: str, example: str) -> None:
    assert len(re.findall(r"[A-Za-z]", example)) >= 6, "says too little to be looked up"
    assert any(message.error == error and explains(example, message.text) for message in MESSAGES)


def test_every_row_has_examples() -> None:
    assert not [(error, cell) for error, cell in ROWS if "`" not in cell and cell != CATCH_ALL]
