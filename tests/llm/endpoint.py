"""A local server with the OpenAI chat completions protocol and scripted answers."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "tiny"
KEY = "good-key"


@dataclass(frozen=True)
class Fault:
    """A scripted error instead of an answer."""

    status: int = 200
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    chunks: tuple[bytes, ...] = ()
    """Raw chunks of a broken stream."""
    endless: str = ""
    """Text that the stream repeats until the client disconnects."""
    wait: float = 0.0
    """Delay of the answer in seconds."""


class Endpoint:
    """Answers each request with the next reply; the last reply is repeated."""

    def __init__(self, *replies: Any, refuses: tuple[str, ...] = (), counts: bool = True, streams: bool = True) -> None:
        """``refuses``: request fields that are rejected with status 400. Without ``streams``, answers are not streamed."""
        self.streams = streams
        self.replies = list(replies)
        self.requests: list[dict[str, Any]] = []
        self.refuses = refuses
        self.counts = counts
        self.lock = threading.Lock()

    @contextmanager
    def serving(self) -> Iterator[dict[str, str]]:
        """Serve on a free port. Yields the environment variables of the endpoint."""
        handler = type("Handler", (_Handler,), {"endpoint": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/v1"
            yield {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": KEY, "MTMC_LLM_MODEL": MODEL}
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def prompt(self, number: int = -1) -> str:
        """The complete text of a request."""
        return "\n".join(str(item["content"]) for item in self.requests[number]["messages"])


class _Handler(BaseHTTPRequestHandler):
    endpoint: Endpoint

    def log_message(self, *args: Any) -> None:
        """Disable logging."""

    def do_GET(self) -> None:
        if self._refused():
            return
        models = [{"id": MODEL, "object": "model", "created": 0, "owned_by": "us"}]
        self._json(200, {"object": "list", "data": models})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._refused():
            return
        with self.endpoint.lock:
            unknown = next((name for name in self.endpoint.refuses if request.get(name)), None)
            if unknown is not None:
                self._error(400, f"Unrecognized request argument supplied: {unknown}")
                return
            if request["model"] != MODEL:
                self._error(404, f"The model `{request['model']}` does not exist")
                return
            self.endpoint.requests.append(request)
            replies = self.endpoint.replies
            reply = replies.pop(0) if len(replies) > 1 else replies[0]
        if callable(reply):
            reply = reply(request)
        if isinstance(reply, Fault):
            self._fault(reply)
        else:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                # The client may disconnect early.
                self._stream(request, reply)

    def _refused(self) -> bool:
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if key != KEY:
            self._error(401, f"Incorrect API key provided: {key}")
        return key != KEY

    def _json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def _error(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        self._json(status, {"error": {"message": message, "type": "error", "code": None}}, headers)

    def _fault(self, fault: Fault) -> None:
        time.sleep(fault.wait)
        if fault.status != 200:
            self._error(fault.status, fault.message, fault.headers)
            return
        self._begin()
        try:
            for chunk in fault.chunks:
                self.wfile.write(chunk)
            while fault.endless:
                self._event(_delta({"content": fault.endless}))
        except OSError:
            pass

    def _begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def _event(self, value: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _stream(self, request: dict[str, Any], text: str) -> None:
        max_length = 4 * request.get("max_tokens", request.get("max_completion_tokens", len(text)))
        finish = "length" if len(text) > max_length else "stop"
        text = text[:max_length]
        prompt_tokens = sum(len(str(item["content"])) for item in request["messages"]) // 4
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(text) // 4,
            "total_tokens": prompt_tokens + len(text) // 4,
        }
        if not (self.endpoint.streams and request["stream"]):
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
            completion = {"id": "c", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice]}
            self._json(200, {**completion, "usage": usage})
            return
        self._begin()
        for i in range(0, len(text), 40):
            piece = text[i : i + 40]
            if "tools" in request:
                call = {"index": 0, "function": {"arguments": piece}}
                call |= {"id": "1", "type": "function"} if not i else {}
                self._event(_delta({"tool_calls": [call]}))
            else:
                self._event(_delta({"content": piece}))
        self._event({**_delta({}), "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        if self.endpoint.counts and "stream_options" in request:
            self._event({**_delta({}), "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")


def _delta(delta: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    return {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": MODEL, "choices": [choice]}
