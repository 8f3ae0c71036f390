"""What becomes of an engine in a forked child, and when its process ends without closing it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing

import pytest

from kvrdma.engine import Engine
from kvrdma.errors import TransportClosedError
from kvrdma.sidechannel import Endpoint, SideChannelClient, SideChannelServer
from kvrdma.wire import AskStore, Noted
from tests.helpers.tagged import Model, Side, done

MODEL = Model(layers=2, block=4, blocks=16)

each_transport = pytest.mark.parametrize(
    "transport",
    [pytest.param("cma", marks=pytest.mark.needs("cma")), pytest.param("ucx", marks=pytest.mark.needs("ucx"))],
)

CALLS: dict[str, Callable[[Engine], object]] = {
    "publish": lambda engine: engine.publish("c", [1, 2], 8),
    "withdraw": lambda engine: engine.withdraw("r"),
    "extend": lambda engine: engine.extend("r", 5),
    "pull": lambda engine: engine.pull("c", PARAMS["r"], [3, 4]),  # type: ignore[arg-type]
    "hold": lambda engine: engine.hold("c", PARAMS["r"]),  # type: ignore[arg-type]
    "decline": lambda engine: engine.decline(PARAMS["r"]),  # type: ignore[arg-type]
    "abort": lambda engine: engine.abort("r"),
    "poll": lambda engine: engine.poll(),
    "wait": lambda engine: engine.wait(1),
}
PARAMS: dict[str, object] = {}


def in_a_child(work: Callable[[], object]) -> int:
    """Give the status that a forked child ends with: 0, or 1 if it raises."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def refused(call: Callable[[Engine], object], engine: Engine) -> None:
    with pytest.raises(TransportClosedError, match="does not survive fork: it was opened in process"):
        call(engine)


@each_transport
def test_a_forked_child_is_refused_and_harms_nothing(transport: str) -> None:
    with Side(MODEL, transport=transport) as producer, Side(MODEL, transport=transport, name="reader") as consumer:
        ours, theirs = producer.ranks[0].engine, consumer.ranks[0].engine
        PARAMS["r"] = ours.publish("r", [1, 2], 8).to_params()
        for name, call in CALLS.items():
            for engine in (ours, theirs):
                assert in_a_child(lambda call=call, engine=engine: refused(call, engine)) == 0, name  # type: ignore[misc]

        def close_both() -> None:
            theirs.close()
            ours.close()

        assert in_a_child(close_both) == 0
        done(consumer.ranks[0].pull("r", PARAMS["r"], [3, 4]))  # type: ignore[arg-type]
        assert ours.publish("s", [1, 2], 8).lease.generation == ours.publish("t", [1, 2], 8).lease.generation - 1


def test_a_forked_child_may_close_a_side_channel() -> None:
    with closing(SideChannelServer(Endpoint("127.0.0.1", 0), lambda _: Noted(7))) as server:
        assert in_a_child(server.close) == 0
        with SideChannelClient(server.endpoint) as client:
            assert client.request(AskStore(), 10) == Noted(7)


EXITS = {
    "falls off the end": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "an exception": ("raise SystemError", 1),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", -2),
    "everything dropped": ("del engines, caches; gc.collect()", 0),
    "one closed": ("engines[0].close()", 0),
}
PROGRAM = """
import atexit, gc, os, signal, sys, threading, time
import numpy as np
from kvrdma import Config, Engine, EngineShape, Identity, LayerSpec

def show():
    print([each.name for each in threading.enumerate() if each.name in ("kvrdma data", "kvrdma clock")])

atexit.register(show)  # runs after whatever an engine has registered
caches = [np.zeros((512, 2, 16, 1024), np.uint8) for _ in range(2)]
spec = LayerSpec(heads=(0, 2), total_heads=2, block_size=16, dims="BHNC")
engines = [
    Engine({"l": cache}, spec, Identity(name, EngineShape(1, 2)), Config(transports=(sys.argv[1],)))
    for name, cache in zip("pd", caches)
]
for number in range(4):
    reference = engines[0].publish(number, range(256), 256 * 16)
    engines[1].pull(number, reference, range(256, 512))
"""


@each_transport
@pytest.mark.parametrize("how", EXITS)
def test_an_interpreter_that_ends_with_pulls_on_their_way(transport: str, how: str) -> None:
    last, code = EXITS[how]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM + last, transport], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == "[]\n"
    assert "defect" not in ended.stderr
    assert "descriptor" not in ended.stderr


USED_TO_THE_END = """
import sys, threading, time
import numpy as np
from kvrdma.transport import Device, open_transport

transport, memory = open_transport(sys.argv[1]), np.zeros(1 << 16, np.uint8)
begun = threading.Barrier(4)


def again(step):
    step()
    begun.wait()
    while True:
        step()


def register():
    transport.deregister(transport.register(memory.ctypes.data, memory.nbytes, Device()))


for step in (transport.poll, transport.poll, register):
    threading.Thread(target=again, args=(step,), daemon=True).start()
begun.wait()
time.sleep(0.05)
"""


@each_transport
def test_threads_that_use_a_transport_to_the_end_do_not_abort_the_process(transport: str) -> None:
    program = [sys.executable, "-c", USED_TO_THE_END, transport]
    for _ in range(5):
        ended = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr
