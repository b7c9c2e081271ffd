"""A proxy on loopback, between botocore and an engine, that breaks requests on demand.

    with Proxy.before(engine) as proxy:
        client = make_client(proxy)
        rule = proxy.fault("UpdateItem", "drop_reply")  # the next UpdateItem; nth=EVERY for all
        ...
        assert rule.fired == 1

Each fault is the method of `_Exchange` that has its name; the options of `fault` are its arguments.
"""

from __future__ import annotations

import contextlib
import http
import http.client
import json
import os
import random
import socket
import socketserver
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from datetime import timedelta
from email.utils import format_datetime, formatdate, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler
from typing import Any

from .engines import Engine, free_port

EVERY = None
ANY = "*"
FAULTS = (
    "drop_reply",
    "reset_reply",
    "fail_reply",
    "cut_reply",
    "empty_reply",
    "delay_reply",
    "hold",
    "throttle",
    "reject",
    "refuse",
)
LINGER_NOT = struct.pack("ii", 1, 0)  # close() then resets instead of saying goodbye
FORWARD_SECONDS = 60  # a stopped engine holds a thread no longer than this
NOT_PASSED_ON = ("connection", "keep-alive", "transfer-encoding", "content-length")


@dataclass
class Request:
    """What became of one request."""

    verb: str
    body: bytes
    time: float  # time.monotonic() when it came
    fault: str | None = None
    forwarded: bool = False
    status: int | None = None  # what the engine said
    answer: int | None = None  # what the client was sent

    @property
    def params(self) -> Any:
        """The operation's parameters in the low-level form."""
        return json.loads(self.body)


@dataclass
class Reply:
    """What goes back: field names in lower case, without those that say how it is sent."""

    status: int
    fields: dict[str, str]
    body: bytes


class Rule:
    """A fault that waits for its request. `fired` counts the requests it has met."""

    def __init__(self, verb: str, fault: str, nth: int | None, options: dict[str, Any]) -> None:
        """See `Proxy.fault`."""
        self.verb, self.fault, self.nth, self.options = verb, fault, nth, options
        self.seen = self.fired = 0
        self.held: deque[Callable[[], int]] = deque()
        self.holding = threading.Event()

    def meets(self, verb: str) -> bool:
        """Count a request, and say whether it is the one."""
        if self.verb not in (ANY, verb):
            return False
        self.seen += 1
        return self.nth in (EVERY, self.seen)

    def wait(self, timeout: float = 10) -> None:
        """Wait until a request is held.

        Raises:
            TimeoutError: None came.
        """
        if not self.holding.wait(timeout):
            raise TimeoutError(f"no {self.verb} was held within {timeout} s")

    def deliver(self, timeout: float = 10) -> list[int]:
        """Send what is held to the engine, in the order it came; the engine's statuses.

        A client that still waits gets the reply. Raises TimeoutError as `wait` does.
        """
        self.wait(timeout)
        self.holding.clear()
        return [self.held.popleft()() for _ in range(len(self.held))]


class Proxy:
    """The proxy; `before` makes and runs one.

    Attributes:
        date: Seconds added to every Date header, a text that replaces it, or None to strip it.
        requests: The last 10,000 requests, oldest first.
        verbs: Requests by verb, all of them.
        faults: Faults applied by name, all of them.
        connections: Connections accepted.
    """

    def __init__(self, upstream: int) -> None:
        """Prepare to stand before a port of 127.0.0.1; see `before`."""
        self.upstream = upstream
        self.port = free_port()
        self.date: float | str | None = 0
        self.requests: deque[Request] = deque(maxlen=10_000)
        self.verbs: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.connections = 0
        self._rules: list[Rule] = []
        self._loss, self._random = 0.0, random.Random()
        self._mutex = threading.Lock()
        self._held: list[Future[Reply]] = []

    @classmethod
    @contextlib.contextmanager
    def before(cls, engine: Engine) -> Iterator[Proxy]:
        """Stand before an engine during the block; what is still held at its end is dropped."""
        proxy = cls(engine.port)
        proxy._listen()
        try:
            yield proxy
        finally:
            proxy._stop()
            for reply in proxy._held:
                reply.cancel()

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"http://127.0.0.1:{self.port}"

    def fault(self, verb: str, fault: str, *, nth: int | None = 1, **options: Any) -> Rule:
        """Break the nth request of a verb (or ANY), counted from now; EVERY breaks them all.

        Every rule counts every request; where several meet one, the oldest has it.
        """
        if fault not in FAULTS:
            raise ValueError(f"no fault {fault!r}: one of {', '.join(FAULTS)}")
        rule = Rule(verb, fault, nth, options)
        with self._mutex:
            self._rules.append(rule)
        return rule

    def lose(self, share: float, seed: int) -> None:
        """Drop this share of all replies, drawn in the order in which the requests come."""
        with self._mutex:
            self._loss, self._random = share, random.Random(seed)

    def heal(self) -> None:
        """End all faults and losses; what is held stays with its rule, and the Date as it is."""
        with self._mutex:
            self._rules, self._loss = [], 0.0

    def forget(self) -> None:
        """Start the records anew."""
        with self._mutex:
            for record in (self.requests, self.verbs, self.faults):
                record.clear()

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Cut every connection, and refuse new ones during the block."""
        self._stop()
        try:
            yield
        finally:
            self._listen()

    def _listen(self) -> None:
        self._server = _Server(self)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._server.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _dated(self, value: str | None) -> str | None:
        """What the client is to see for this Date."""
        if value is None or self.date is None or isinstance(self.date, str):
            return value and self.date
        moved = parsedate_to_datetime(value) + timedelta(seconds=self.date)
        return format_datetime(moved, usegmt=True)

    def _admit(self, request: Request) -> Rule | None:
        """Record a request and find the rule that breaks it, if there is one."""
        with self._mutex:
            met = [rule for rule in self._rules if rule.meets(request.verb)]
            if not met and self._loss and self._random.random() < self._loss:
                met = [Rule(ANY, "drop_reply", EVERY, {})]
            self.requests.append(request)
            self.verbs[request.verb] += 1
            if not met:
                return None
            met[0].fired += 1
            request.fault = met[0].fault
            self.faults[request.fault] += 1
            return met[0]


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", proxy.port), _Exchange)

    def get_request(self) -> Any:
        connection, address = super().get_request()
        self.open.add(connection)
        self.proxy.connections += 1
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self.open.discard(request)
        super().shutdown_request(request)


class _Exchange(BaseHTTPRequestHandler):
    """One client's connection: its requests, and what each fault does to them."""

    protocol_version = "HTTP/1.1"  # keep-alive, as botocore is used to
    disable_nagle_algorithm = True
    server: _Server

    def handle(self) -> None:
        # Clients give up and engines are stopped: that is what the rig is for.
        with contextlib.suppress(OSError, http.client.HTTPException):
            super().handle()

    def do_POST(self) -> None:
        verb = self.headers["X-Amz-Target"].rpartition(".")[2]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.record = Request(verb, body, time.monotonic())
        self.rule = self.server.proxy._admit(self.record)
        if self.rule:
            getattr(self, self.rule.fault)(**self.rule.options)
        else:
            self.reply(self.forward())

    # Faults after the engine has done what it was asked.

    def drop_reply(self) -> None:
        """Close in place of the reply."""
        self.forward()
        self.close_connection = True

    def reset_reply(self) -> None:
        """Reset in place of the reply."""
        self.forward()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
        os.close(self.connection.detach())  # a close() would wait for rfile, a shutdown() say FIN
        self.close_connection = True

    def fail_reply(self) -> None:
        """Answer 500 in place of the reply."""
        self.forward()
        self.reply(self.error("InternalServerError", 500))

    def cut_reply(self, share: float = 0.5, *, checksum: bool = True) -> None:
        """Send the header and a share of the body that it announces, then close."""
        reply = self.forward(checksum=checksum)
        self.reply(reply, sent=int(len(reply.body) * share))
        self.close_connection = True

    def empty_reply(self, *, checksum: bool = True) -> None:
        """Send a header that announces no body; without the checksum, botocore believes it."""
        reply = self.forward(checksum=checksum)
        self.reply(Reply(reply.status, reply.fields, b""))

    def delay_reply(self, seconds: float) -> None:
        """Keep the reply back for a while."""
        reply = self.forward()
        time.sleep(seconds)
        self.reply(reply)

    # Faults before the engine has seen anything.

    def hold(self) -> None:
        """Keep the request back until `Rule.deliver`, be its client there or not."""
        answer: Future[Reply] = Future()

        def deliver() -> int:
            answer.set_result(self.forward())
            return answer.result().status

        self.server.proxy._held.append(answer)
        self.rule.held.append(deliver)
        self.rule.holding.set()
        with contextlib.suppress(CancelledError):
            self.reply(answer.result())

    def throttle(self, code: str = "ProvisionedThroughputExceededException") -> None:
        """Answer that there were too many requests."""
        self.reject(code)

    def reject(self, code: str, status: int = 400) -> None:
        """Answer with an error."""
        self.reply(self.error(code, status))

    def refuse(self) -> None:
        """Close."""
        self.close_connection = True

    # What they are made of.

    def forward(self, *, checksum: bool = True) -> Reply:
        """Send the request to the engine, on a connection of its own: a stale one would lie."""
        self.record.forwarded = True
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.proxy.upstream, timeout=FORWARD_SECONDS)
        with contextlib.closing(upstream):
            fields = {**self.headers, "Connection": "close"}
            upstream.request("POST", self.path, self.record.body, fields)
            response = upstream.getresponse()
            fields = {k.lower(): v for k, v in response.getheaders()}
            for field in NOT_PASSED_ON if checksum else (*NOT_PASSED_ON, "x-amz-crc32"):
                fields.pop(field, None)
            reply = Reply(response.status, fields, response.read())
        self.record.status = reply.status
        return reply

    def error(self, code: str, status: int) -> Reply:
        body = {"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": "by the rig"}
        fields = {"content-type": "application/x-amz-json-1.0", "date": formatdate(usegmt=True)}
        return Reply(status, fields, json.dumps(body).encode())

    def reply(self, reply: Reply, sent: int | None = None) -> None:
        """Answer the client; `sent` cuts the body to so many bytes and leaves the header."""
        self.record.answer = reply.status
        fields = {**reply.fields, "content-length": str(len(reply.body))}
        if date := self.server.proxy._dated(fields.pop("date", None)):
            fields["date"] = date
        lines = [f"{name}: {value}\r\n" for name, value in fields.items()]
        head = f"HTTP/1.1 {reply.status} {http.HTTPStatus(reply.status).phrase}\r\n"
        self.wfile.write("".join([head, *lines, "\r\n"]).encode("latin-1") + reply.body[:sent])
