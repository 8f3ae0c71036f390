"""A proxy in front of one prefill and one decode server: what every P/D router does, in its simplest form.

``python examples/pd_proxy.py LISTEN_PORT PREFILL_URL DECODE_URL``
"""

from __future__ import annotations

import sys
import uuid

from aiohttp import ClientSession, web

_NEW = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
        "remote_host": None, "remote_port": None}  # fmt: skip


class Proxy:
    """Sends each request to the prefill server for one token, then to the decode server with what it said."""

    def __init__(self, prefill: str, decode: str) -> None:
        """Remember where the servers are."""
        self._prefill = prefill
        self._decode = decode

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion or chat completion, streaming if asked to."""
        body = await request.json()
        headers = {"X-Request-Id": str(uuid.uuid4())}
        first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": dict(_NEW)}
        for key in ("stream_options", "max_completion_tokens", "min_tokens"):
            first.pop(key, None)
        async with ClientSession() as session:
            async with session.post(self._prefill + request.path, json=first, headers=headers) as answer:
                if answer.status != 200:
                    return web.Response(status=answer.status, body=await answer.read())
                params = (await answer.json()).get("kv_transfer_params")
            second = {**body, "kv_transfer_params": params}
            async with session.post(self._decode + request.path, json=second, headers=headers) as answer:
                stream = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
                await stream.prepare(request)
                async for chunk in answer.content.iter_any():
                    await stream.write(chunk)
                return stream


def main(port: int, prefill: str, decode: str) -> None:
    """Serve until interrupted."""
    app = web.Application()
    proxy = Proxy(prefill, decode)
    app.router.add_post("/v1/completions", proxy.handle)
    app.router.add_post("/v1/chat/completions", proxy.handle)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
