"""The clients that are compared, each used as its documentation or its code says.

All of them make their boto3 clients from the default session, so that `wire` sees their requests.
Their imports stand inside the functions, so that a fresh process pays only for its own.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

NAME = "bench"
OURS = {"LockID": "S"}

Cycle = Callable[..., None]  # hold the lock around a call
Release = Callable[[], object]


class Client(NamedTuple):
    """How a client is called in the table, and what it needs."""

    title: str
    package: str | None  # on PyPI
    keys: dict[str, str]  # of its table
    cycle: Callable[[str], Cycle]  # takes the table's name


class Waiter(NamedTuple):
    """What one caller does with a lock that others want, too."""

    wait: Callable[[], Release]
    try_once: Callable[[], Release | None]
    expires_at: Callable[[Any, float], float]  # by what the table has, and when it was acquired


def _nothing() -> None:
    pass


def bare(table: str) -> Cycle:
    import boto3

    return bare_cycle(boto3.client("dynamodb"), table)


def bare_cycle(client: Any, table: str) -> Cycle:
    import uuid

    def cycle(inside: Callable[[], object] = _nothing, name: str = NAME) -> None:
        key, owner, now = {"LockID": {"S": name}}, {"S": str(uuid.uuid4())}, int(time.time())
        client.update_item(
            TableName=table,
            Key=key,
            UpdateExpression="SET OwnerID = :owner, ExpiresAt = :expires",
            ConditionExpression="attribute_not_exists(LockID) OR ExpiresAt < :now",
            ExpressionAttributeValues={
                ":owner": owner,
                ":expires": {"N": str(now + 60)},
                ":now": {"N": str(now)},
            },
        )
        inside()
        client.delete_item(
            TableName=table,
            Key=key,
            ConditionExpression="OwnerID = :owner",
            ExpressionAttributeValues={":owner": owner},
        )

    return cycle


def replay(table: str) -> Cycle:
    """The bare client with the very requests of simplelock: what their content alone costs."""
    import boto3

    from simplelock import LockTable

    client = boto3.client("dynamodb")
    requests: list[dict[str, Any]] = []

    def note(params: dict[str, Any], **_: Any) -> None:
        requests.append(dict(params))

    client.meta.events.register_first("provide-client-params.dynamodb", note)
    locks = LockTable(table, client=client)
    for _ in range(2):  # the second is what a warm table sends
        requests.clear()
        locks.acquire(NAME).release()
    client.meta.events.unregister("provide-client-params.dynamodb", note)
    acquire, release = requests

    def cycle(inside: Callable[[], object] = _nothing) -> None:
        client.update_item(**acquire)
        inside()
        client.delete_item(**release)

    return cycle


def resource(table: str) -> Cycle:
    import uuid

    import boto3
    from boto3.dynamodb.conditions import Attr

    locks = boto3.resource("dynamodb").Table(table)

    def cycle(inside: Callable[[], object] = _nothing) -> None:
        owner, now = str(uuid.uuid4()), int(time.time())
        locks.put_item(
            Item={"LockID": NAME, "OwnerID": owner, "ExpiresAt": now + 60},
            ConditionExpression=Attr("LockID").not_exists() | Attr("ExpiresAt").lt(now),
        )
        inside()
        locks.delete_item(Key={"LockID": NAME}, ConditionExpression=Attr("OwnerID").eq(owner))

    return cycle


def simplelock(table: str) -> Cycle:
    from simplelock import LockTable

    return simplelock_cycle(LockTable(table))


def simplelock_fencing(table: str) -> Cycle:
    from simplelock import LockTable

    return simplelock_cycle(LockTable(table, fencing=True))


def simplelock_cycle(locks: Any) -> Cycle:
    def cycle(inside: Callable[[], object] = _nothing, name: str = NAME) -> None:
        with locks.acquire(name):
            inside()

    return cycle


def simplelock_heartbeat(table: str) -> Cycle:
    from simplelock import LockTable

    locks = LockTable(table)

    def cycle(inside: Callable[[], object] = _nothing) -> None:
        with locks.acquire(NAME) as lease, lease.heartbeat():
            inside()

    return cycle


def python_dynamodb_lock(table: str) -> Cycle:
    import boto3
    from python_dynamodb_lock.python_dynamodb_lock import DynamoDBLockClient

    client = DynamoDBLockClient(boto3.resource("dynamodb"), table_name=table)

    def cycle(inside: Callable[[], object] = _nothing) -> None:
        lock = client.acquire_lock(NAME)
        inside()
        lock.release(best_effort=False)

    return cycle


def dynamo_dlm(table: str) -> Cycle:
    from dynamo_dlm import DynamoDbLock

    lock = DynamoDbLock(NAME, table_name=table)  # makes a resource, and may be acquired again

    def cycle(inside: Callable[[], object] = _nothing) -> None:
        with lock:
            inside()

    return cycle


def dynalock(table: str) -> Cycle:
    from dynalock import DynaLock

    lock = DynaLock(NAME, os.environ["AWS_DEFAULT_REGION"], table)  # makes a resource, and may be acquired again

    def cycle(inside: Callable[[], object] = _nothing) -> None:
        with lock.lock():
            inside()

    return cycle


def dyndbmutex(table: str) -> Cycle:
    os.environ["DD_MUTEX_TABLE_NAME"] = table
    from dyndbmutex.dyndbmutex import DynamoDbMutex

    mutex = DynamoDbMutex(NAME, region_name=os.environ["AWS_DEFAULT_REGION"])  # makes a resource and a client

    def cycle(inside: Callable[[], object] = _nothing) -> None:
        with mutex:
            inside()

    return cycle


def dynamodblock(table: str) -> Cycle:
    import boto3
    from dynamodblock import DynamoDBLock

    locks = boto3.resource("dynamodb").Table(table)

    def cycle(inside: Callable[[], object] = _nothing) -> None:
        with DynamoDBLock(NAME, locks):  # one that was released never releases again
            inside()

    return cycle


CLIENTS = {
    "bare": Client("bare client", None, OURS, bare),
    "replay": Client("bare client, simplelock's requests", None, OURS, replay),
    "resource": Client("boto3 Table resource", None, OURS, resource),
    "simplelock": Client("simplelock", None, OURS, simplelock),
    "fencing": Client("simplelock, fencing", None, OURS, simplelock_fencing),
    "heartbeat": Client("simplelock, heartbeat", None, OURS, simplelock_heartbeat),
    "dynamo-dlm": Client(
        "dynamo-dlm",
        "dynamo-dlm==2.1.0",
        {"resource_id": "S", "concurrency_id": "N"},
        dynamo_dlm,
    ),
    "dynalock": Client("dynalock", "dynalock==0.3.0", {"LockId": "S"}, dynalock),
    "python-dynamodb-lock": Client(
        "python-dynamodb-lock",
        "python-dynamodb-lock==0.9.1",
        {"lock_key": "S", "sort_key": "S"},
        python_dynamodb_lock,
    ),
    "dynamodblock": Client("dynamodblock", "dynamodblock==1.0.6", {"lock_id": "S"}, dynamodblock),
    "dyndbmutex": Client("dyndbmutex", "dyndbmutex==0.4.0", {"lockname": "S"}, dyndbmutex),
}


def simplelock_waiters(table: str, ttl: int, count: int) -> list[Waiter]:
    from simplelock import LockTable

    locks = LockTable(table, ttl=ttl)

    def try_once() -> Release | None:
        lease = locks.try_acquire(NAME)
        return lease.release if lease else None

    def wait() -> Release:
        return locks.acquire(NAME, wait=math.inf).release

    return [Waiter(wait, try_once, lambda item, _: int(item["ExpiresAt"]))] * count


def dynamo_dlm_waiters(table: str, ttl: int, count: int) -> list[Waiter]:
    from dynamo_dlm import DynamoDbLock, LockNotAcquiredError

    def try_once() -> Release | None:
        lock = DynamoDbLock(NAME, ttl, table, wait_forever=False)  # one that failed stays unusable
        try:
            lock.acquire()
        except LockNotAcquiredError:
            return None
        return lock.release

    def waiter() -> Waiter:
        lock = DynamoDbLock(NAME, ttl, table)

        def wait() -> Release:
            lock.acquire()
            return lock.release

        return Waiter(wait, try_once, lambda item, _: int(item["expires"]))

    return [waiter() for _ in range(count)]


def python_dynamodb_lock_waiters(table: str, ttl: int, count: int) -> list[Waiter]:
    from datetime import timedelta

    import boto3
    from python_dynamodb_lock.python_dynamodb_lock import DynamoDBLockClient, DynamoDBLockError

    client = DynamoDBLockClient(
        boto3.resource("dynamodb"),
        table_name=table,
        lease_duration=timedelta(seconds=ttl),
        heartbeat_period=timedelta(seconds=min(ttl / 4, 5)),  # as it advises, and its default
    )

    def wait() -> Release:
        return client.acquire_lock(NAME, retry_timeout=timedelta(days=1)).release

    def try_once() -> Release | None:
        try:
            return client.acquire_lock(NAME, retry_timeout=timedelta(microseconds=1)).release
        except DynamoDBLockError as error:
            if error.code != DynamoDBLockError.ACQUIRE_TIMEOUT:
                raise
            return None

    # It stores no time of expiry.
    return [Waiter(wait, try_once, lambda _, acquired: acquired + ttl)] * count


WAITERS = {
    "simplelock": simplelock_waiters,
    "dynamo-dlm": dynamo_dlm_waiters,
    "python-dynamodb-lock": python_dynamodb_lock_waiters,
}
