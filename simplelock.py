"""Locks in a DynamoDB table: only one of us at a time, for one conditional write.

    locks = LockTable("Locks", ttl=60)
    with locks.acquire("nightly", wait=30) as lease, lease.heartbeat():
        for batch in work:
            lease.check()  # raises LockLost as soon as the lock is not surely ours
            store(batch)

A `LockTable` says where locks live, a `Lease` is the proof of holding one. A lock whose holder died is free as soon
as the lease has run out. Times, waits and periods are in seconds.

Limits: a lock holds in one Region (in a global table both sides can win), and never through DAX. Waiters do not queue.
No lock stops a paused process from writing late; a store that compares fencing tokens does.
"""

from __future__ import annotations

import email.utils
import functools
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as BotoConnectionError

if TYPE_CHECKING:
    import argparse

__version__ = "0.1.0"
__all__ = ["Holder", "Lease", "LockError", "LockHeld", "LockLost", "LockTable", "LockTableError", "main"]

MAX_TTL = 366 * 86400  # above it, somebody has passed milliseconds
MAX_KEY_BYTES, MAX_SORT_KEY_BYTES = 2048, 1024  # DynamoDB's limits
MAX_OWNER_BYTES, MAX_DATA_BYTES = 2048, 400_000  # ours, below DynamoDB's 409,600 for a whole item
MIN_PAUSE, MAX_PAUSE = 0.05, 1.0  # between two looks of a waiter
TOMBSTONE_SECONDS = 3600
MAX_SURPLUS = 3  # by which an item may outlast its ttl
PR_SET_PDEATHSIG = 1  # prctl(2)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
DRIFT = 0.0005  # by which the rates of two clocks differ at most: adjtimex(2) slews by 500 ppm

_MUTEX = threading.Lock()
_RANDOM = random.SystemRandom()  # processes that seeded `random` alike must not meet
_hostname = functools.cache(socket.gethostname)


class LockError(Exception):
    """Base of this module's errors."""


@dataclass(eq=False)
class LockHeld(LockError):
    """Another holds the lock `key`; `holder` tells who, where the table could."""

    key: str
    holder: Holder | None = None

    def __str__(self) -> str:
        return f"{self.key!r} is held by {self.holder or 'another'}"


@dataclass(eq=False)
class LockLost(LockError):
    """The lock `key` is not, or not surely, held by `owner` any more; `reason` tells why."""

    key: str
    owner: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key!r} is not held by {self.owner} any more: {self.reason}"


class LockTableError(LockError):
    """The table is missing or has other keys, or an item in it is not a lock."""


@dataclass(frozen=True)
class Holder:
    """What the table tells of a lock; it is free to be taken when `expires_in` is below 0."""

    key: str
    owner: str
    expires_at: int
    expires_in: float
    fencing_token: int | None = None
    data: str | None = None

    def __str__(self) -> str:
        note = f" ({self.data})" if self.data else ""
        return f"{self.owner}{note}, {abs(self.expires_in):.0f} s {'past' if self.expires_in < 0 else 'to'} its expiry"


class LockTable:
    """A table of locks. Thread-safe; keeps no locks itself.

    Args:
        name: The table's name or ARN.
        client: A `boto3.client("dynamodb")`, used as it is. By default one is made on first use, which gives up
            before a usual lease runs out.
        ttl: How long a lease runs when it is not renewed.
        key_name, expires_name: The attributes that are the partition key and the TTL.
        sort_key: Name and value of the sort key, where the table has one.
        fencing: Whether leases carry fencing tokens; the same for all clients of a lock.
    """

    def __init__(
        self,
        name: str,
        *,
        client: Any = None,
        ttl: float = 60.0,
        key_name: str = "LockID",
        expires_name: str = "ExpiresAt",
        sort_key: tuple[str, str] | None = None,
        fencing: bool = False,
    ) -> None:
        self.name, self.ttl, self.fencing = _text("name", name, 1024), _seconds("ttl", ttl, MAX_TTL), fencing
        self._key_name, self._expires_name = key_name, expires_name
        names_by_usual = {"LockID": key_name, "ExpiresAt": expires_name}
        self._renamed = {usual: name for usual, name in names_by_usual.items() if name != usual}
        self._sort = {sort_key[0]: {"S": _text("sort key", sort_key[1], MAX_SORT_KEY_BYTES)}} if sort_key else {}
        names = [_text("attribute name", name, 255) for name in (key_name, expires_name, *self._sort)]
        names += ["OwnerID", "LockData", "FencingToken"]
        if len(set(names)) < len(names):
            raise ValueError(f"attribute names must differ, not {names}")
        is_client = isinstance(client, BaseClient) and client.meta.service_model.service_name == "dynamodb"
        if not (client is None or is_client):
            raise TypeError(f'client is a boto3.client("dynamodb"), not {client!r}')
        self._client = self._given = client
        self._made_in: int | None = None  # the process that made our own client
        self._clock = _Clock()

    def try_acquire(
        self, key: str, *, ttl: float | None = None, owner: str | None = None, data: str | None = None
    ) -> Lease | None:
        """Try once, without waiting; return the lease, or None when another holds the lock.

        Args:
            key: The lock's name, 1 to 2048 bytes of UTF-8.
            ttl: How long the lease runs when it is not renewed; by default the table's.
            owner: Who we are, for others to read; by default the host and the process id.
            data: A note for others to read.

        Raises:
            LockTableError: The table, or the item of this name, cannot serve as a lock.
        """
        lease = Lease(self, key, ttl, owner, data)
        return None if lease._acquire() else lease

    def acquire(
        self, key: str, *, wait: float = 0, ttl: float | None = None, owner: str | None = None, data: str | None = None
    ) -> Lease:
        """Do as `try_acquire`, but try for `wait` seconds (`math.inf`: for ever).

        Raises:
            LockHeld: Another held it all the time.
        """
        deadline = time.monotonic() + _seconds("wait", wait, math.inf, zero=True)
        lease = Lease(self, key, ttl, owner, data)
        held, pause = lease._acquire(), MIN_PAUSE
        while held:
            left = deadline - time.monotonic()
            if left <= 0:
                raise held
            if held.holder and held.holder.expires_in >= 0:  # a reply dated with the expiry makes it 0
                left = min(left, held.holder.expires_in + 0.002)  # a try compares in milliseconds
            time.sleep(min(_RANDOM.uniform(0, pause), left))
            pause = min(2 * pause, MAX_PAUSE)
            if time.monotonic() < deadline:  # a look costs a tenth of a try
                holder = self._look(key, consistent=False)
                if holder and holder.expires_in >= 0 and holder.owner != lease.owner:
                    held = LockHeld(key, holder)
                    continue
            held = lease._acquire()
        return lease

    def acquire_all(
        self, keys: Iterable[str], *, wait: float = 0, ttl: float | None = None, owner: str | None = None
    ) -> AbstractContextManager[list[Lease]]:
        """Hold all the locks, or none, in a `with`; acquired in sorted order, against deadlocks.

        Raises:
            LockHeld: Another held one of them to the end of `wait`.
            LockLost: One was lost before the last was acquired.
        """
        if isinstance(keys, str):
            raise TypeError("keys is a collection of names, not a name")
        names = sorted({Lease(self, key, ttl, owner).key for key in keys})
        return self._acquire_all(names, _seconds("wait", wait, math.inf, zero=True), ttl, owner)

    @contextmanager
    def _acquire_all(self, keys: list[str], wait: float, ttl: float | None, owner: str | None) -> Iterator[list[Lease]]:
        deadline = time.monotonic() + wait
        leases: list[Lease] = []
        with ExitStack() as held:
            with ExitStack() as beating:  # none may run out while the next is waited for
                for key in keys:
                    left = max(0.0, deadline - time.monotonic())
                    leases.append(held.enter_context(self.acquire(key, wait=left, ttl=ttl, owner=owner)))
                    beating.enter_context(leases[-1].heartbeat())
            for lease in leases:
                lease.check()
            yield leases

    def resume(self, key: str, owner: str, *, ttl: float | None = None) -> Lease:
        """Go on with a lease that was acquired elsewhere, by its `key` and whole `owner`.

        Raises:
            LockLost: It is not that owner's any more.
        """
        lease = self._lease_of(key, owner, ttl)
        lease.renew()
        return lease

    def release(self, key: str, owner: str) -> bool:
        """Release the lock if the whole `owner` holds it; False if not.

        True also where the SDK sent twice and found nothing: the first send released it.
        """
        answer = self._lease_of(key, owner)._release()
        return answer.granted or (answer.retried and self._found(key, answer) is None)

    def holder(self, key: str) -> Holder | None:
        """Read who holds the lock, or held it until it expired, without taking it."""
        return self._look(_text("key", key, MAX_KEY_BYTES))

    def holders(self) -> Iterator[Holder]:
        """Read all locks of the table, page by page, passing over items that are no locks."""
        page: dict[str, Any] = {"LastEvaluatedKey": None}
        while "LastEvaluatedKey" in page:
            start = {"ExclusiveStartKey": page["LastEvaluatedKey"]} if page["LastEvaluatedKey"] else {}
            page = self._read("scan", ConsistentRead=True, **start)
            for item in page["Items"]:
                holder = None
                with suppress(LockTableError, KeyError):
                    holder = self._holder(item[self._key_name]["S"], item)
                if holder and self._key(holder.key).items() <= item.items():
                    yield holder

    def create(self, *, wait: bool = True) -> None:
        """Create the table, with TTL, for development; for production see `infra/table.yaml`.

        A table that exists is kept. With `wait=False`, return while it is being created; TTL, which needs the finished
        table, is then turned on by a later call that waits.

        Raises:
            LockTableError: The table exists with other keys.
        """
        names = list(self._key(""))
        keys = [{"AttributeName": names[0], "KeyType": "HASH"}]
        keys += [{"AttributeName": name, "KeyType": "RANGE"} for name in self._sort]
        types = [{"AttributeName": name, "AttributeType": "S"} for name in names]
        schema, table = {"KeySchema": keys, "AttributeDefinitions": types}, {"TableName": self.name}
        with suppress(self.client.exceptions.ResourceInUseException):
            self.client.create_table(**table, **schema, BillingMode="PAY_PER_REQUEST")
        if not wait:
            return
        self.client.get_waiter("table_exists").wait(**table, WaiterConfig={"Delay": 1, "MaxAttempts": 120})
        found = self.client.describe_table(**table)["Table"]
        if found["KeySchema"] != keys or any(item not in found["AttributeDefinitions"] for item in types):
            raise LockTableError(self._complaint("exists with other keys"))
        expires = self._expires_name
        if self.client.describe_time_to_live(**table)["TimeToLiveDescription"].get("AttributeName") != expires:
            ttl = {"AttributeName": expires, "Enabled": True}
            self.client.update_time_to_live(**table, TimeToLiveSpecification=ttl)

    @property
    def client(self) -> Any:
        """The DynamoDB client in use."""
        # A forked child makes its own: on the parent's connections it could read the parent's replies.
        if self._given is None and self._made_in != os.getpid():
            with _MUTEX:  # boto3's default session serves one thread at a time
                if self._made_in != os.getpid():
                    self._client, self._made_in = _default_client(), os.getpid()
        return self._client

    def _lease_of(self, key: str, owner: str, ttl: float | None = None) -> Lease:
        lease = Lease(self, key, ttl)
        lease.owner, lease._unread = _text("owner", owner, MAX_OWNER_BYTES), True
        return lease

    def _found(self, key: str, answer: _Answer) -> Holder | None:
        # Without an item, there is none, or the reply was cut short, or the engine never sends it.
        return self._holder(key, answer.item) if answer.item else self._look(key)

    def _look(self, key: str, *, consistent: bool = True) -> Holder | None:
        return self._holder(key, self._read("get_item", Key=self._key(key), ConsistentRead=consistent).get("Item"))

    def _read(self, operation: str, **request: Any) -> dict[str, Any]:
        for _ in range(3):
            reply = self._send(operation, ReturnConsumedCapacity="TOTAL", **request).reply
            if "ConsumedCapacity" in reply:  # else it was cut short, and proves nothing
                return reply
        raise LockError(self._complaint("sent three replies that were cut short"))

    def _write(self, key: str, request: dict[str, Any]) -> _Answer:
        for usual, name in self._renamed.items():  # by a placeholder, since it may be a reserved word
            for text in ("ConditionExpression", "UpdateExpression"):
                if usual in request.get(text, ""):
                    request[text] = request[text].replace(usual, f"#{usual}")
                    request.setdefault("ExpressionAttributeNames", {})[f"#{usual}"] = name
        operation = "update_item" if "UpdateExpression" in request else "delete_item"
        return self._send(operation, Key=self._key(key), ReturnValuesOnConditionCheckFailure="ALL_OLD", **request)

    def _send(self, operation: str, **request: Any) -> _Answer:
        send = getattr(self.client, operation)
        sent, wall, granted = time.monotonic(), time.time(), True
        try:
            reply = send(TableName=self.name, **request)
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code in ("ResourceNotFoundException", "ValidationException"):
                raise LockTableError(self._complaint(f"refused the request ({error})")) from error
            if code != "ConditionalCheckFailedException":
                raise
            reply, granted = error.response, False
        metadata = reply.get("ResponseMetadata", {})  # which botocore's Stubber leaves out
        self._clock.learn(sent, metadata.get("HTTPHeaders", {}).get("date"))
        item = reply.get("Item") or reply.get("Attributes")
        return _Answer(granted, item, metadata.get("RetryAttempts", 0) > 0, sent, wall, reply)

    def _holder(self, key: str, item: dict[str, Any] | None) -> Holder | None:
        """Whose the lock is by its item; None without one, and for a tombstone."""
        if not item or ("OwnerID" not in item and "FencingToken" in item):
            return None
        owner, expires_at = item.get("OwnerID", {}).get("S"), item.get(self._expires_name, {}).get("N")
        if owner is None or expires_at is None:
            raise LockTableError(self._complaint(f"has an item {key!r} that is not a lock"))
        expires_in = float(expires_at) - self._clock.now()[0]
        token = int(float(item.get("FencingToken", {}).get("N", 0))) or None
        data = item.get("LockData", {}).get("S")
        return Holder(key, owner, math.ceil(float(expires_at)), expires_in, token, data)

    def _key(self, key: str) -> dict[str, Any]:
        return {self._key_name: {"S": key}, **self._sort}

    def _complaint(self, what: str) -> str:
        return (
            f"table {self.name!r} in Region {self.client.meta.region_name} {what}. A lock table has the key"
            f" {' and '.join(self._key(''))} (S); infra/table.yaml or simplelock create-table makes it"
        )


class Lease:
    """Proof that a lock was acquired, and the clock that tells whether it is surely held.

    As a context manager it releases the lock on the way out. In a forked child it is inert.
    """

    def __init__(
        self, table: LockTable, key: str, ttl: float | None = None, label: str | None = None, data: str | None = None
    ) -> None:
        label = f"{_hostname()}:{os.getpid()}" if label is None else label
        self.key = _text("key", key, MAX_KEY_BYTES)
        self.owner = f"{_text('owner', label, MAX_OWNER_BYTES // 2)}/{os.urandom(8).hex()}"
        self.data = None if data is None else _text("data", data, MAX_DATA_BYTES, least=0)
        self.expires_at = 0  # from when on others can take the lock, in epoch seconds of DynamoDB's clock
        self.fencing_token: int | None = None
        self._table, self._clock, self._pid = table, table._clock, os.getpid()
        self._ttl = table.ttl if ttl is None else _seconds("ttl", ttl, MAX_TTL)
        self._ends = (0.0, 0.0)  # by the monotonic and by the wall clock
        self._lost: str | None = None  # why it is not held, and never will be again
        self._trouble = "it ran out"
        self._held_at_release: bool | None = None  # None: no release was sent yet
        self._taken = self._released = False
        self._unread = False  # whether the table still has to tell token and data
        self._named: set[int] = set()  # expiries that a late shortening may replace, so never to be written again
        self._renewing = threading.Lock()

    def __repr__(self) -> str:
        return f"<Lease of {self.key!r} by {self.owner}, {self.remaining:.1f} s remaining>"

    @property
    def remaining(self) -> float:
        """For how long the lock is surely held; 0.0 when it is not."""
        if self._lost or self._pid != os.getpid():
            return 0.0
        # The monotonic clock stands still while a machine is suspended, and the wall clock can be set.
        return max(0.0, min(self._ends[0] - time.monotonic(), self._ends[1] - time.time()))

    @property
    def held(self) -> bool:
        """Whether the lock is surely held at this moment, by the clock alone."""
        return self.remaining > 0

    def check(self) -> None:
        """Raise `LockLost` unless the lock is surely held at this moment, by the clock alone."""
        if not self.held:
            raise self._loss()

    def renew(self, ttl: float | None = None) -> None:
        """Let the lease run for `ttl` from now, and by later renewals; by default as before.

        A lease that ran out can be renewed as long as nobody took the lock. After any error but `LockLost`, it
        keeps the deadline it had. A heartbeat that is running keeps its period: a ttl below that runs out.

        Raises:
            LockLost: The lock was taken by another, deleted or released.
        """
        if self._lost or self._pid != os.getpid():
            raise self._loss()
        with self._renewing:  # of two answers, the older must not come last
            self._ttl = self._ttl if ttl is None else _seconds("ttl", ttl, MAX_TTL)
            taken = self._put(functools.partial(_renew, self.owner, None))
            if taken:
                self._lost = f"{taken.holder.owner} has taken it" if taken.holder else "its item is gone"
                raise self._loss()

    def release(self) -> bool:
        """Release the lock; False if it was not ours any more.

        It is not held from the moment this is called. After an error, call it again.
        """
        if self._released or self._pid != os.getpid():
            return False
        again = self._held_at_release is not None
        if not again:
            self._held_at_release, self._lost = self.held, "it was released"
        answer = self._release()
        self._released = True
        # Refused, though ours when it was first sent: then an earlier send did it, whoever came since.
        return answer.granted or bool(self._held_at_release and (again or answer.retried))

    def heartbeat(
        self, period: float | None = None, on_lost: Callable[[Lease], object] | None = None
    ) -> AbstractContextManager[Lease]:
        """Renew the lease in the background while the body of the `with` runs.

        Args:
            period: Time from renewal to renewal, at most half the ttl; by default a third.
            on_lost: Called once with the lease, in a thread of its own, as soon as the lock is not surely held any
                more, even while a renewal hangs.
        """
        period = self._ttl / 3 if period is None else _seconds("period", period, self._ttl / 2)
        return self._heartbeat(period, on_lost)

    @contextmanager
    def _heartbeat(self, period: float, on_lost: Callable[[Lease], object] | None) -> Iterator[Lease]:
        ended = threading.Event()
        threads = [threading.Thread(target=self._beat, args=(period, ended), daemon=True)]
        if on_lost:
            threads.append(threading.Thread(target=self._watch, args=(on_lost, ended), daemon=True))
        with ExitStack() as stack:
            for thread in threads:
                thread.start()
                stack.callback(thread.join)
                stack.callback(ended.set)
            yield self

    def _beat(self, period: float, ended: threading.Event) -> None:
        while not ended.wait(min(period, self.remaining / 2)):
            try:
                self.renew()
            except Exception as error:  # whatever it is, the next try may succeed
                self._trouble = f"it ran out, since renewing failed: {error!r}"
                if not self.held:
                    break
        ended.set()

    def _watch(self, on_lost: Callable[[Lease], object], ended: threading.Event) -> None:
        while self.held and not ended.wait(min(self.remaining, 0.4)):
            pass  # waiting, too, stands still while the machine is suspended
        if not self.held and self._held_at_release is None:
            self._lost = self._lost or self._trouble  # a late renewal must not unsay it
            ended.set()
            on_lost(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._released or self._pid != os.getpid():
            return
        lost = self._loss()
        with suppress(*[Exception] if error else []):  # the body's own error is never replaced
            if not self.release():
                raise lost

    def _loss(self) -> LockLost:
        inert = self._pid != os.getpid() and "it belongs to the parent process"
        reason = inert or self._lost or (self.held and "another has released it") or self._trouble
        return LockLost(self.key, self.owner, reason)

    def _acquire(self) -> LockHeld | None:
        """Try once, and tell whether another holds the lock."""
        fencing = self._table.fencing
        try:
            if fencing:
                earliest, latest = self._clock.now()
                if latest - earliest > MAX_SURPLUS:
                    self._table._look(self.key)  # a token must start from DynamoDB's clock
            for _ in range(2):  # again, at once, where the refusal shows that the lock is free
                earliest, latest = self._clock.now()
                seed, self._unread = int(latest * 1000) if fencing else None, fencing
                held = self._put(functools.partial(_acquire, self.owner, self.data, seed, earliest))
                if held is None or (held.holder and held.holder.expires_in >= 0):
                    break
        except BaseException as error:
            if self._taken or not _not_applied(error):
                with suppress(Exception):
                    self._release()
            raise
        return held

    def _put(self, write: Callable[[int], dict[str, Any]], *, again: bool = True) -> LockHeld | None:
        """Write a new expiry and, if the lock is ours then, count down from the answer; else tell who holds it."""
        expires_at = math.ceil(self._clock.now()[1] + self._ttl)
        while expires_at in self._named:
            expires_at += 1
        request = write(expires_at)
        if self._unread:
            request["ReturnValues"] = "ALL_NEW"
        answer = self._table._write(self.key, request)
        self._taken = self._taken or answer.granted or answer.retried
        if self._unread or not answer.granted:
            holder = self._table._found(self.key, answer)
            if holder is None or holder.owner != self.owner:
                return LockHeld(self.key, holder)
            self._taken, self._unread, expires_at = True, False, holder.expires_at
            self.data, self.fencing_token = holder.data, holder.fencing_token if self._table.fencing else None
        left = expires_at - self._clock.now()[1]
        runs = min(self._ttl, left + time.monotonic() - answer.sent - DRIFT * self._ttl)
        self.expires_at, self._ends = expires_at, (answer.sent + runs, answer.wall + runs)
        surplus = left - self._ttl
        if again and not -1 <= surplus <= MAX_SURPLUS:  # by a wrong clock, a slow reply or a shorter ttl: put it right
            seen = expires_at if surplus > 0 else None
            if seen:
                self._named.add(seen)
            return self._put(functools.partial(_renew, self.owner, seen), again=False)
        return None

    def _release(self) -> _Answer:
        tombstone = math.ceil(self._clock.now()[1]) + TOMBSTONE_SECONDS if self._table.fencing else None
        return self._table._write(self.key, _release(self.owner, tombstone))


class _Clock:
    """DynamoDB's clock, as the `Date` headers of its replies show it.

    A reply dated `d`, received at `g` by the monotonic clock to a request sent at `s`, proves that server time less
    monotonic time lies in [d - g, d + 2 - s]: a date is cut to the second, and may be a second old. What earlier
    replies proved holds too, once it is widened by what the clocks may have drifted apart, and by the time for which
    the machine was suspended, which the wall clock shows. Where the two do not meet all the same, the newer counts.
    """

    def __init__(self) -> None:
        self._bounds: tuple[float, float, float, float] | None = None  # only ever replaced whole
        self._replied = False  # if none of its replies has a date, the wall clock must do

    def now(self) -> tuple[float, float]:
        """Times that DynamoDB's clock has surely reached, and surely not passed."""
        return self._at(time.monotonic(), time.time())

    def learn(self, sent: float, header: str | None) -> None:
        wall, received = time.time(), time.monotonic()
        low, high = self._at(received, wall) if self._bounds else (-math.inf, math.inf)
        date = _epoch_seconds(header)
        if date is not None:
            earliest, latest = float(date), date + 2 + received - sent
            if low <= latest and earliest <= high:
                earliest, latest = max(low, earliest), min(high, latest)
            self._bounds = (earliest, latest, received, wall)
        self._replied = True  # not before: another thread would go by the wall clock

    def _at(self, monotonic: float, wall: float) -> tuple[float, float]:
        if not self._bounds:
            return (wall, wall) if self._replied else (0.0, wall + 2)
        low, high, learnt, wall_then = self._bounds
        passed = monotonic - learnt
        drift, suspended = DRIFT * passed, max(0.0, wall - wall_then - passed)
        return low + passed - drift, high + passed + drift + suspended


@functools.lru_cache(maxsize=8)
def _epoch_seconds(header: str | None) -> int | None:
    with suppress(ValueError, OverflowError):  # a year that no calendar has
        parsed = email.utils.parsedate_tz(header or "")
        return parsed and email.utils.mktime_tz(parsed)
    return None


# The protocol: an item, and three conditional writes.
#
# LockID        S  the lock's name (partition key; the attribute's name can be chosen)
# OwnerID       S  label/nonce; the equality of the whole is ownership
# ExpiresAt     N  epoch seconds, rounded up to whole ones (TTL; the attribute's name can be chosen)
# LockData      S  the holder's note, if any
# FencingToken  N  counts acquisitions, from DynamoDB's time in milliseconds on; only with fencing
#
# With fencing, a release keeps the item for an hour as a tombstone, without OwnerID and free to be taken, so that the
# count goes on; by the time TTL sweeps it, time has overtaken the count.
#
# A reply can be lost after its request was applied, and a request be applied long after its sender gave up. So a
# refused acquisition that finds its own owner was granted before. A renewal only moves the expiry on, else a late one
# would undercut a newer one; to shorten a lease, it names the expiry that it replaces.


class _Answer(NamedTuple):
    granted: bool
    item: dict[str, Any] | None
    retried: bool  # the SDK sent the request more than once
    sent: float  # before the first send, by the monotonic clock
    wall: float  # the same by the wall clock
    reply: dict[str, Any]


def _acquire(owner: str, data: str | None, seed: int | None, now: float, expires: int) -> dict[str, Any]:
    condition = (
        "attribute_not_exists(LockID)"
        " OR (attribute_type(OwnerID, :string) AND ExpiresAt < :now)"
        " OR (attribute_not_exists(OwnerID) AND attribute_exists(FencingToken))"
    )
    update = "SET OwnerID = :owner, ExpiresAt = :expires"
    values = {
        ":owner": {"S": owner},
        ":expires": {"N": str(expires)},
        ":now": {"N": str(math.floor(now * 1000) / 1000)},
        ":string": {"S": "S"},
    }
    if seed is not None:
        update += ", FencingToken = if_not_exists(FencingToken, :seed) + :one"
        values |= {":seed": {"N": str(seed)}, ":one": {"N": "1"}}
    if data is not None:
        update += ", LockData = :data"
        values[":data"] = {"S": data}
    else:
        update += " REMOVE LockData"
    return {"ConditionExpression": condition, "UpdateExpression": update, "ExpressionAttributeValues": values}


def _renew(owner: str, seen: int | None, expires: int) -> dict[str, Any]:
    condition, update = "OwnerID = :owner AND ExpiresAt <= :expires", "SET ExpiresAt = :expires"
    values = {":owner": {"S": owner}, ":expires": {"N": str(expires)}}
    if seen is not None:
        condition, values[":seen"] = "OwnerID = :owner AND ExpiresAt = :seen", {"N": str(seen)}
    return {"ConditionExpression": condition, "UpdateExpression": update, "ExpressionAttributeValues": values}


def _release(owner: str, tombstone: int | None) -> dict[str, Any]:
    condition, values = "OwnerID = :owner", {":owner": {"S": owner}}
    if tombstone is None:
        return {"ConditionExpression": condition, "ExpressionAttributeValues": values}
    update, values[":expires"] = "SET ExpiresAt = :expires REMOVE OwnerID, LockData", {"N": str(tombstone)}
    return {"ConditionExpression": condition, "UpdateExpression": update, "ExpressionAttributeValues": values}


def _not_applied(error: BaseException) -> bool:
    """Whether the error proves that its request was not applied: never sent, or sent once and refused."""
    cause = error.__cause__ if isinstance(error, LockTableError) else error
    if isinstance(cause, ClientError):
        metadata = cause.response.get("ResponseMetadata", {})
        return metadata.get("HTTPStatusCode", 500) < 500 and metadata.get("RetryAttempts", 0) == 0
    return cause is None or (
        isinstance(cause, BotoCoreError) and not isinstance(cause, (BotoConnectionError, HTTPClientError))
    )


def _default_client() -> Any:
    """A client that gives up before a usual lease runs out: botocore's defaults do not."""
    import boto3

    config = Config(
        connect_timeout=2,
        read_timeout=3,
        retries={"mode": "standard", "total_max_attempts": 3},
        max_pool_connections=64,
        user_agent_extra=f"simplelock/{__version__}",
    )
    return boto3.client("dynamodb", config=config)


def _seconds(name: str, value: float, most: float, *, zero: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number of seconds, not {type(value).__name__}")
    if not (0 < value <= most or (zero and value == 0)):  # refuses NaN too
        raise ValueError(f"{name} is above 0{' or 0' * zero} and at most {most:.9g} s, not {value!r}")
    return value


def _text(name: str, value: str, most: int, *, least: int = 1) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is a string, not {type(value).__name__}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:  # half of a character
        size = -1
    if not least <= size <= most:
        raise ValueError(f"{name} is {least} to {most} bytes of UTF-8, not {value[:80]!r}")
    return value


# The command line


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    cut = argv.index("--") if argv[:1] == ["run"] and "--" in argv else len(argv)
    parser = _parser()
    parser.set_defaults(command=argv[cut + 1 :], ttl=60.0, fencing=False)
    args = parser.parse_args(argv[:cut])
    try:
        return int(args.do(LockTable(args.table, ttl=args.ttl, fencing=args.fencing), args))
    except (LockError, BotoCoreError, ClientError) as error:
        hint = "" if isinstance(error, LockError) else "; check credentials, permissions, Region and endpoint"
        return _say(f"{error}{hint}", 69)  # EX_UNAVAILABLE of sysexits.h
    except (TypeError, ValueError) as error:  # raised before any request
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    import argparse  # not at the top: the library is imported more often than the command line is used

    parser = argparse.ArgumentParser("simplelock", description="Locks in a DynamoDB table.")
    parser.add_argument("--version", action="version", version=f"simplelock {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def add(do: Callable[..., int], summary: str, example: str, *positional: str, to_print: bool = False) -> Any:
        name = example.partition(" ")[0]
        verb = verbs.add_parser(name, help=summary, description=summary, epilog=f"example: simplelock {example}")
        table = os.environ.get("SIMPLELOCK_TABLE") or "Locks"
        verb.add_argument("--table", default=table, help="by default $SIMPLELOCK_TABLE, else Locks")
        for argument in positional:
            verb.add_argument(argument, metavar=argument.upper())
        if to_print:
            verb.add_argument("--json", action="store_true", help="for programs")
        verb.set_defaults(do=do)
        return verb

    run = add(_run, "Hold a lock while a command runs.", "run --wait 60 nightly -- ./backup.sh --all", "key")
    run.usage = "simplelock run [options] KEY -- COMMAND [ARGUMENT ...]"
    run.add_argument("--ttl", type=float, default=60.0, help="seconds a lease runs when not renewed; by default 60")
    run.add_argument("--wait", type=float, default=0.0, help="seconds to try for, or inf; by default one try")
    run.add_argument("--conflict-exit-code", type=int, default=75, metavar="N", help="when held; by default 75")
    run.add_argument("--data", help="a note for others to read")
    run.add_argument("--fencing", action="store_true", help="give the command a fencing token")
    run.add_argument("--quiet", action="store_true", help="do not say who holds the lock")
    add(_show, "Show who holds a lock.", "show --json nightly", "key", to_print=True)
    add(_list, "List the locks of the table.", "list --json", to_print=True)
    add(_break, "Release a lock by its owner, as show tells it.", "release nightly web1:7/5c0e", "key", "owner")
    add(_create, "Create the table, for development.", "create-table --table Locks")
    return parser


def _run(locks: LockTable, args: argparse.Namespace) -> int:
    if not args.command:
        raise ValueError("run needs a command after --")
    if not 0 <= args.conflict_exit_code <= 255:
        raise ValueError("--conflict-exit-code is 0 to 255")
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    status = None
    try:
        with locks.acquire(args.key, wait=args.wait, data=args.data) as lease:
            status = _supervise(lease, args.command)
            lease.check()
    except LockHeld as held:
        return args.conflict_exit_code if args.quiet else _say(held, args.conflict_exit_code)
    except LockLost as lost:
        return _say(lost, 70)  # EX_SOFTWARE of sysexits.h
    except (LockError, BotoCoreError, ClientError) as error:
        if status is None:
            raise
        return _say(f"the command has ended, but its lock could not be released: {error}", status)
    return status


def _supervise(lease: Lease, command: Sequence[str]) -> int:
    """Run the command while the lease is held, and return its exit status as a shell does."""
    import ctypes

    told = {"KEY": lease.key, "OWNER": lease.owner, "FENCING_TOKEN": lease.fencing_token}
    env = os.environ | {f"SIMPLELOCK_{name}": str(value or "") for name, value in told.items()}
    prctl = getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)  # Linux; when we are killed, the command is too
    group, early = 0, []  # of the command's processes; signals that came before there was one to pass them on to

    def forward(number: int, _frame: object = None) -> None:
        if not group:
            early.append(number)
            return
        with suppress(OSError):  # it has ended, or is another user's
            os.killpg(group, number)

    def stop(_lease: Lease) -> None:
        forward(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(5)
        forward(signal.SIGKILL)

    for number in STOP_SIGNALS:
        signal.signal(number, forward)
    try:  # in a session of its own, so that the terminal's signals reach it only once, through us; no thread runs yet
        begin = functools.partial(prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
        child = subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=begin)  # noqa: S603, PLW1509
    except OSError as error:
        return _say(error, 127 if isinstance(error, FileNotFoundError) else 126)  # as a shell has it
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # it would stop the heartbeat, but not the command
    group = child.pid
    for missed in early:
        forward(missed)
    try:
        with lease.heartbeat(on_lost=stop):
            status = child.wait()
    except BaseException:  # no thread for the heartbeat
        stop(lease)
        raise
    return status if status >= 0 else 128 - status


def _show(locks: LockTable, args: argparse.Namespace) -> int:
    holder = locks.holder(args.key)
    held = holder and holder.expires_in >= 0
    if args.json:
        print(json.dumps(holder and asdict(holder)))
    else:
        print(f"{args.key!r} {'was' if holder and not held else 'is'} held by {holder or 'nobody'}")
    return 0 if held else 1


def _list(locks: LockTable, args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps([asdict(holder) for holder in locks.holders()]))
    else:
        for holder in locks.holders():
            print(f"{holder.key}: {holder}")
    return 0


def _break(locks: LockTable, args: argparse.Namespace) -> int:
    holder = locks.holder(args.key)
    locks.fencing = bool(holder and holder.fencing_token)  # keep the count of the tokens
    released = locks.release(args.key, args.owner)
    print("released" if released else f"{args.key!r} is not held by {args.owner}")
    return 0 if released else 1


def _create(locks: LockTable, _args: argparse.Namespace) -> int:
    locks.create()
    return 0


def _say(what: object, status: int) -> int:
    print(f"simplelock: {' '.join(str(what).split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
