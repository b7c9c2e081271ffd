"""A process that works for one client, on command.

    python -m tests.bench.worker CLIENT TABLE [--offline]

Reads a call a line, `[method, arguments]` in JSON, and answers each with a line.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import resource
import sys
import threading
import time
from typing import Any

import boto3
import botocore.session

from simplelock import LockTable

from .clients import CLIENTS, NAME, WAITERS, Waiter
from .wire import Wire


class Worker:
    """The public methods are the calls."""

    def __init__(self, client: str, table: str, *, offline: bool) -> None:
        session = botocore.session.get_session()
        self.wire = Wire(session, offline=offline)
        boto3.setup_default_session(botocore_session=session)
        self.client, self.table = client, table

    # A cycle

    def start(self) -> None:
        """Make the client and warm it up."""
        self.run = CLIENTS[self.client].cycle(self.table)
        for _ in range(3):
            self.run()

    def cycles(self, count: int) -> dict[str, float]:
        """Run so many cycles; return what one costs."""
        self.wire.count()
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(count):
            self.run()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        sent = self.wire.count().total()
        return {"cpu": cpu / count * 1e6, "wall": wall / count * 1e6, "requests": sent / count}

    def threads(self, count: int, seconds: float) -> float:
        """Run cycles in so many threads, each with its own lock; return how many a second."""
        done, end = [0] * count, time.monotonic() + seconds

        def work(number: int) -> None:
            while time.monotonic() < end:
                self.run(name=f"{NAME}-{number}")
                done[number] += 1

        threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(done) / seconds

    # Waiting

    def hold(self, ttl: int) -> dict[str, float]:
        """Acquire the lock; return when, and when it expires by the table."""
        (waiter,) = self._waiters(ttl)
        waiter.wait()
        acquired = time.time()
        (item,) = boto3.resource("dynamodb").Table(self.table).scan()["Items"]
        return {"acquired": acquired, "expires": waiter.expires_at(item, acquired)}

    def take(self, ttl: int) -> float:
        """Wait for the lock, and release it; return when it was acquired."""
        release = self._waiters(ttl)[0].wait()
        acquired = time.time()
        release()
        return acquired

    def take_trying(self, ttl: int, pause: float, seconds: float) -> float | None:
        """Do the same by single tries; None when it takes more than so many seconds."""
        (waiter,), deadline = self._waiters(ttl), time.monotonic() + seconds
        while time.monotonic() < deadline:
            if release := waiter.try_once():
                acquired = time.time()
                release()
                return acquired
            time.sleep(pause)
        return None

    def wait_in_vain(self, ttl: int, count: int, seconds: float) -> dict[str, int]:
        """Have so many threads wait for a lock; return what was sent, by kind.

        They wait on when this returns: the process is to be killed.
        """
        waiters = self._waiters(ttl, count)
        self.wire.count()
        for waiter in waiters:
            threading.Thread(target=waiter.wait, daemon=True).start()
        time.sleep(seconds)
        return self.wire.count()

    def hand_over(self, ttl: int, count: int) -> list[float]:
        """Let a lock go while one waits for it; return after how long that one had it."""
        (holder, waiter), delays = self._waiters(ttl, 2), []
        for _ in range(count):
            release, taken = holder.wait(), []

            def take(taken: list[Any] = taken) -> None:
                taken.append((waiter.wait(), time.monotonic()))

            thread = threading.Thread(target=take)
            thread.start()
            time.sleep(random.uniform(2, 3))  # until its pauses are at their longest
            released = time.monotonic()
            release()
            thread.join()
            ((release, acquired),) = taken
            delays.append(acquired - released)
            release()
        return delays

    def queue(self, ttl: int, count: int) -> list[float]:
        """Have so many threads take turns; return when each had its own, from the first release."""
        (first, *waiters), acquired = self._waiters(ttl, count + 1), []

        def turn(waiter: Waiter) -> None:
            release = waiter.wait()
            acquired.append(time.monotonic())
            release()

        release = first.wait()
        threads = [threading.Thread(target=turn, args=(waiter,)) for waiter in waiters]
        for thread in threads:
            thread.start()
        time.sleep(2)
        released = time.monotonic()
        release()
        for thread in threads:
            thread.join()
        return [moment - released for moment in acquired]

    def _waiters(self, ttl: int, count: int = 1) -> list[Waiter]:
        return WAITERS[self.client](self.table, ttl, count)

    # Many leases

    def leases(self, count: int, ttl: float, seconds: float) -> dict[str, float]:
        """Hold so many leases with heartbeats for so long, after as many bare renewals."""
        locks = LockTable(self.table, ttl=ttl)
        bare = self._bare_renewals(locks, seconds, pause=ttl / 3 / count)
        memory, threads = _memory(), threading.active_count()
        log = self.wire.log = []
        with contextlib.ExitStack() as stack:
            held = []
            for number in range(count):
                held.append(stack.enter_context(locks.acquire(f"{NAME}-{number}")))
                stack.enter_context(held[-1].heartbeat())
            cpu, start = time.process_time(), time.monotonic()
            time.sleep(seconds)
            cpu, end = time.process_time() - cpu, time.monotonic()
            self.wire.log = None
            figures = {
                "threads": threading.active_count() - threads,
                "memory": _memory() - memory,
                "lost": sum(not lease.held for lease in held),
            }
        figures |= _renewals(log, start, end, ttl)
        return figures | {"cpu": cpu / figures["done"] * 1e6, "bare": bare * 1e6}

    def _bare_renewals(self, locks: Any, seconds: float, pause: float) -> float:
        """The CPU seconds of one renewal that the bare client sends, as often as heartbeats do."""
        requests: list[dict[str, Any]] = []

        def note(params: dict[str, Any], **_: Any) -> None:
            requests.append(dict(params))

        with locks.acquire(NAME) as lease:
            locks.client.meta.events.register_first("provide-client-params.dynamodb", note)
            lease.renew()
            locks.client.meta.events.unregister("provide-client-params.dynamodb", note)
            cpu, sent, end = time.process_time(), 0, time.monotonic() + seconds
            while time.monotonic() < end:
                locks.client.update_item(**requests[0])
                sent += 1
                time.sleep(pause)
            return (time.process_time() - cpu) / sent

    # A table full of locks

    def fill(self, count: int) -> None:
        """Put so many locks into the table."""
        items = (
            {"LockID": f"job-{n:08}", "OwnerID": f"host:1/{n:016x}", "ExpiresAt": 1893456000} for n in range(count)
        )
        with boto3.resource("dynamodb").Table(self.table).batch_writer() as batch:
            for item in items:
                batch.put_item(Item=item)

    def holders(self) -> dict[str, float]:
        """Go through all the locks of the table."""
        locks = LockTable(self.table)
        locks.holder(NAME)  # makes the client
        self.wire.count()
        start, count, early = time.perf_counter(), 0, 0.0
        for _ in locks.holders():
            count += 1
            if len(self.wire.sent) <= 2:  # a page is parsed while the one before is still there
                early = _memory()
        seconds, pages = time.perf_counter() - start, self.wire.count()["Scan"]
        return {"locks": count, "pages": pages, "wall": seconds, "memory": _memory() - early}


def _memory() -> float:
    """The most memory that this process has had so far, in MB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def _renewals(log: list[tuple[float, bytes]], start: float, end: float, ttl: float) -> dict[str, float]:
    """How many were due from start to end, and done, and the longest that any lease went without.

    The first request for each key acquired it.
    """
    times: dict[str, list[float]] = {}
    for sent, body in log:
        times.setdefault(json.dumps(json.loads(body)["Key"]), []).append(sent)
    acquired = [sent[0] for sent in times.values()]
    gaps = [b - a for sent in times.values() for a, b in itertools.pairwise([*sent, end])]
    return {
        "due": sum(int((end - t) / (ttl / 3)) - int((start - t) / (ttl / 3)) for t in acquired),
        "done": sum(sent > start for sent, _ in log),
        "longest": max(gaps) / ttl,
    }


def main(client: str, table: str, *options: str) -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a client prints must not come between
    logging.getLogger().addHandler(logging.NullHandler())  # else its warnings are printed
    worker = Worker(client, table, offline="--offline" in options)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        print(json.dumps(getattr(worker, method)(**arguments)), file=answers)
    os._exit(0)  # some clients leave threads


if __name__ == "__main__":
    main(*sys.argv[1:])
