"""What the tests share: an in-process DynamoDB, its clock, and a count of what is sent to it."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import boto3
import freezegun
import pytest
from botocore.client import BaseClient
from botocore.config import Config
from moto import mock_aws
from moto.dynamodb.models import dynamodb_backends

from simplelock import LockTable

# By default freezegun shows the real time to whatever has a frame of these modules close by, and so
# to the first calls of each thread.
freezegun.configure(default_ignore_list=["_pytest.terminal.", "_pytest.runner."])

PLAIN = "not rig and not bench"  # the marks of a run that asks for none, as setup.cfg has them
RETRIES = Config(retries={"mode": "standard", "total_max_attempts": 3})  # whatever boto3's default


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A part of the suite has ended before other processes have started, and what it measures wants quiet."""
    if not _whole(config):
        config.option.numprocesses = 0


def pytest_configure(config: pytest.Config) -> None:
    """A part of the suite covers a part of the module."""
    coverage = config.pluginmanager.get_plugin("_cov")
    if coverage and not _whole(config):
        coverage.options.no_cov = True


def _whole(config: pytest.Config) -> bool:
    chosen = any(config.getoption(option, None) for option in ("keyword", "deselect", "lf", "collectonly"))
    whole = config.args_source is config.ArgsSource.TESTPATHS
    return whole and not chosen and config.getoption("markexpr") == PLAIN


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import the rig, which needs more packages, to leave all of it out."""
    return (collection_path.name == "rig" and config.getoption("markexpr") == PLAIN) or None


def _untraced(call: Callable[..., Any]) -> Callable[..., Any]:
    """Keep coverage's tracer out of a call that runs none of the module's lines: it would take as long again."""

    @functools.wraps(call)
    def untraced(*args: Any, **options: Any) -> Any:
        tracer = sys.gettrace()
        if not hasattr(tracer, "stop"):  # nothing is measured, or somebody debugs
            return call(*args, **options)
        tracer.stop()
        try:
            return call(*args, **options)
        finally:
            tracer.start()

    return untraced


BaseClient._make_api_call = _untraced(BaseClient._make_api_call)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from going through all that was imported, again and again."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the caller's AWS settings, or can reach an account."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Frozen time, for DynamoDB too. `clock.tick(s)` moves it on, and so does `time.sleep`."""
    with freezegun.freeze_time("2026-01-01 00:00:00") as frozen:
        monkeypatch.setattr(time, "sleep", frozen.tick)
        yield frozen


@pytest.fixture(scope="module")
def _moto() -> Iterator[None]:
    with mock_aws():  # once for many tests, since starting it takes as long as a test
        yield


@pytest.fixture
def client(_moto: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A low-level client of an in-process DynamoDB, empty at first, which retries at once."""
    dynamodb_backends.reset()
    client = _client()
    for name in ("register", "register_first", "register_last"):
        register = getattr(client.meta.events, name)

        def note(*to_what: Any, register: Callable[..., None] = register, **options: Any) -> None:
            _client.cache_clear()  # it is not as good as new any more, nor are its retries' tokens
            register(*to_what, **options)

        monkeypatch.setattr(client.meta.events, name, note)
    return client


@functools.cache
def _client() -> Any:
    return _session().client("dynamodb", config=RETRIES)  # for many tests, since making it takes as long as a test


@functools.cache
def _session() -> boto3.Session:
    return boto3.Session()  # one for all: it takes ten times as long to make as a client


@pytest.fixture
def make_table(client: Any) -> Callable[..., LockTable]:
    """Make a `LockTable`, with its table where that is missing. Each one has a clock of its own."""

    def make(name: str = "Locks", **options: Any) -> LockTable:
        locks = LockTable(name, **{"client": client, **options})
        locks.create(wait=False)
        return locks

    return make


@pytest.fixture
def locks(make_table: Callable[..., LockTable]) -> LockTable:
    """A lock table with the default names."""
    return make_table()


@pytest.fixture
def sent(client: Any) -> list[str]:
    """The operations that have been sent to DynamoDB, one by one, retries included."""
    operations: list[str] = []

    def note(request: Any, **_: Any) -> None:
        operations.append(request.headers["X-Amz-Target"].decode().split(".")[1])

    client.meta.events.register_first("before-send.dynamodb", note)
    return operations


class Driven:
    """Frozen time that `time.sleep` drives: what happens in it, and what was slept."""

    def __init__(self, clock: Any) -> None:
        self.pauses: list[float] = []
        self._clock, self._due = clock, []

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Have it happen so many seconds from now, in the midst of a sleep."""
        self._due.append((time.time() + seconds, action))
        self._due.sort(key=lambda due: due[0])

    def sleep(self, seconds: float) -> None:
        """Be `time.sleep`."""
        assert seconds >= 0, "it would raise a ValueError"
        self.pauses.append(seconds)
        end = time.time() + max(seconds, 1e-6)  # the frozen clock's resolution
        while self._due and self._due[0][0] <= end:
            at, action = self._due.pop(0)
            self._clock.tick(max(0, at - time.time()))
            action()
        self._clock.tick(max(0, end - time.time()))


@pytest.fixture
def driven(clock: Any, monkeypatch: pytest.MonkeyPatch) -> Driven:
    """Frozen time, with `later` for what is to happen, and the `pauses` that were made."""
    driven = Driven(clock)
    monkeypatch.setattr(time, "sleep", driven.sleep)
    return driven


@pytest.fixture
def rival(locks: LockTable, client: Any) -> LockTable:
    """The table of `locks` as another process has it, which has not spoken to DynamoDB yet."""
    return LockTable(locks.name, client=client)


@pytest.fixture
def stored(client: Any) -> Callable[..., dict[str, Any] | None]:
    """Read the item of a lock as the table has it; None where there is none."""

    def read(key: str = "a", table: str = "Locks") -> dict[str, Any] | None:
        return client.get_item(TableName=table, Key={"LockID": {"S": key}}).get("Item")

    return read


@pytest.fixture
def meets(client: Any) -> Callable[[str, Iterable[Any]], None]:
    """Let the next sends of an operation meet faults (of `faults`, or None), one each, in turn."""
    coming: dict[str, Iterator[Any]] = collections.defaultdict(lambda: iter(()))

    def meet(request: Any, **_: Any) -> Any:
        operation = request.headers["X-Amz-Target"].decode().split(".")[1]
        fault = next(coming[operation], None)
        return fault and fault(request)

    client.meta.events.register("before-send.dynamodb", meet)

    def meets(operation: str, faults: Iterable[Any]) -> None:
        coming[operation] = iter(faults)

    return meets


class Host:
    """The clocks of the machine that the module runs on; DynamoDB keeps the true time."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._ahead = {"time": 0.0, "monotonic": 0.0}

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        """Stand in for `time.time`."""
        return time.time() + self._ahead["time"]

    def monotonic(self) -> float:
        """Stand in for `time.monotonic`."""
        return time.monotonic() + self._ahead["monotonic"]

    def set(self, *, wall: float) -> None:
        """Set the wall clock that far ahead of the true time."""
        self._ahead["time"] = wall

    @contextlib.contextmanager
    def off(self, wall: float) -> Iterator[None]:
        """Be another machine for a while, with a wall clock that far ahead of the true time."""
        before = self._ahead["time"]
        self.set(wall=wall)
        yield
        self.set(wall=before)

    def suspend(self, seconds: float) -> None:
        """Sleep as a laptop with its lid shut: the monotonic clock stands still meanwhile."""
        self._clock.tick(seconds)
        self._ahead["monotonic"] -= seconds

    def idle(self, seconds: float, *, drift: float) -> None:
        """Let time pass for clocks which gain that share of it on DynamoDB's."""
        self._clock.tick(seconds)
        for clock in self._ahead:
            self._ahead[clock] += seconds * drift


@pytest.fixture
def host(clock: Any, monkeypatch: pytest.MonkeyPatch) -> Host:
    """The module's machine, whose clocks can go wrong."""
    host = Host(clock)
    monkeypatch.setattr("simplelock.time", host)
    return host


@pytest.fixture
def steal(client: Any) -> Callable[..., dict[str, Any]]:
    """Give a lock to another, whoever has it; return the item."""

    def steal(key: str = "a", seconds: float = 60) -> dict[str, Any]:
        expires_at = {"N": str(int(time.time() + seconds))}
        item = {"LockID": {"S": key}, "OwnerID": {"S": "thief/1"}, "ExpiresAt": expires_at}
        client.put_item(TableName="Locks", Item=item)
        return item

    return steal


@pytest.fixture
def in_child() -> Callable[[Callable[[], Any]], Any]:
    """Call a function in a forked child; return what it returned there, by way of JSON."""

    def call(function: Callable[[], Any]) -> Any:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writer, json.dumps(function()).encode())
            finally:
                os._exit(0)  # without pytest's own way out
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        return json.loads(answer)

    return call
