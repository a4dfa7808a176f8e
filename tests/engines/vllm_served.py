"""A front over real vLLM engines: a `Service` on an event loop in a thread of its own, and what asks it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_driver import PATIENCE, Engines
from vllm_questions import CHAT

import smg
from smg.http.front import FrontOptions
from smg.http.service import Service, ServiceOptions


def wait_live(group: smg.EngineGroup, engines: Engines) -> None:
    """Until all ranks are live; an engine that ends meanwhile fails at once, with its output."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return group.wait_ready(0.5)
        except smg.NotReady as late:
            if not engines.running or time.monotonic() > deadline:
                raise AssertionError(f"{late}; {engines.told()}") from None


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of every event, without the [DONE] that has to be the last."""
        *events, done, rest = self.body.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        return [json.loads(event.removeprefix(b"data: ")) for event in events]


class Front:
    """The service, and its group for those who embed it. Engines may dial `group.handshake_address`."""

    def __init__(self, directory: Path, model: Path, ranks: int) -> None:
        self._options = ServiceOptions(
            worker_urls=[f"ipc://{directory}/g"],
            backend="vllm",
            model_path=str(model),
            ranks=ranks,
            handshake_address="tcp://127.0.0.1:0",
            port=0,
            prometheus_port=0,
            front=FrontOptions(served_model_name="tiny"),
        )
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._up: concurrent.futures.Future[Service] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.service = self._up.result(60)
        self.group: smg.EngineGroup = self.service.groups[0]

    def _run(self) -> None:
        async def main() -> None:
            try:
                async with Service(self._options) as service:
                    self._up.set_result(service)
                    await self._stop.wait()
            except BaseException as exc:
                if self._up.done():
                    raise
                self._up.set_exception(exc)

        self._loop.run_until_complete(main())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(30)
        assert not self._thread.is_alive()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.service.port, timeout=120)

    def ask(self, path: str, body: dict[str, Any]) -> Answer:
        connection = self.connect()
        try:
            connection.request("POST", path, json.dumps({"model": "tiny", **body}))
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()


def pieced_together(path: str, events: list[Any]) -> dict[str, Any]:
    """The choices and the usage of a streamed answer, as one that was not streamed has them."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for part in event["choices"]:
            whole = choices.setdefault(part["index"], {"index": part["index"], "text": "", "logprobs": None})
            delta = part.get("delta", {})
            whole["text"] += (delta.get("content") or "") if path == CHAT else part["text"]
            if part.get("logprobs"):
                parts = whole["logprobs"] or {name: [] for name in part["logprobs"]}
                whole["logprobs"] = {
                    name: parts[name] + (part["logprobs"][name] or []) if parts[name] is not None else None
                    for name in parts
                }
            whole["finish_reason"] = part["finish_reason"]
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that run in threads of their own."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(call) for call in calls]]
