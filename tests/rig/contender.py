"""A worker of the contention test: a supervisor, and the contender that it forks, breaks and forks again.

    python -m rig.contender SETTINGS  # of the class Settings, as JSON

It runs until its standard input ends. What happens is appended to the log, a line for each event:

    held T NAME OWNER TOKEN    at T, by CLOCK_MONOTONIC, the lease said that it is held
    lapsed T NAME OWNER TOKEN  and here that it is not
    lost, late                 a reply was lost; a request was delivered after its caller had given up
    kill, crash, stop, step    what the supervisor did to the contender, or to its wall clock
    error TEXT                 what must not happen
"""

from __future__ import annotations

import email.utils
import itertools
import json
import mmap
import os
import random
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from botocore.awsrequest import AWSResponse
from botocore.exceptions import BotoCoreError, ClientError, ConnectionClosedError, ReadTimeoutError
from botocore.httpsession import URLLib3Session

from simplelock import Lease, LockHeld, LockLost, LockTable

from . import engines

TTLS = (1, 1.5, 2)  # short, so that leases run out and are taken over all the time
WAITS = {0: 50, 0.2: 30, 1: 15, 5: 5}  # the longest outlasts a dead holder
STYLES = {"brief": 80, "renewed": 10, "beating": 2, "overstayed": 5, "abandoned": 3}
PIECE_SECONDS = 0.02  # of work between two looks at `held`
LOST = 0.05  # of all replies
LATE = 0.01  # of all requests but acquisitions
LATE_SECONDS = 1.5
FATES = {"stop": 4, "kill": 3, "crash": 2}
STEPS = (-3600, -20, 0, 20, 3600)
SETTLE_SECONDS = 15
LOST_CODE = "LostReply"


@dataclass(frozen=True)
class Settings:
    """What a worker is told."""

    url: str
    table: str
    log: str
    seed: str
    number: int
    names: int  # of each kind, with and without fencing tokens
    threads: int
    clock: str | None = None  # the file that sets the wall clock, if it is to step


class Log:
    """The log, which all workers share: one write for each line keeps the lines whole."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, *words: object) -> None:
        """Append a line."""
        os.write(self.file, (" ".join(map(str, words)) + "\n").encode())


class Contender:
    """One life: threads that take, hold and lose locks until the process is ended."""

    def __init__(self, settings: Settings, life: int, log: Log, operations: mmap.mmap) -> None:
        self.settings, self.log, self.operations = settings, log, operations
        self.seed = f"{settings.seed}/{settings.number}/{life}"
        self.random = random.Random(self.seed)
        sends = self.random.choice((1, 3))  # without a second send, a lost reply is an error
        self.client = engines.make_client(settings, retries={"mode": "standard", "total_max_attempts": sends})
        self.client.meta.events.register("before-send.dynamodb.*", self.break_exchange)
        self.client.meta.events.register("before-parse.dynamodb.*", self.age_date)
        self.direct = URLLib3Session(max_pool_connections=64)
        self.own_tables = self.random.random() < 0.5

    def live(self) -> None:
        """Go on for ever."""
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(1))  # a crash: nothing is released
        tables = self.tables()
        threads = [
            threading.Thread(target=self.contend, args=(number, self.tables() if self.own_tables else tables))
            for number in range(self.settings.threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def tables(self) -> list[LockTable]:
        """Make the two tables that know nothing of DynamoDB's clock yet."""
        return [LockTable(self.settings.table, client=self.client, fencing=fencing) for fencing in (False, True)]

    def contend(self, number: int, tables: list[LockTable]) -> None:
        """Use both tables in turn, and count the turns."""
        rng = random.Random(f"{self.seed}/{number}")
        label, left = f"{os.getpid()}.{number}", set()  # the names that may be ours without our knowing
        for turn in itertools.count(1):
            fencing = turn % 2
            name = f"{'fenced' if fencing else 'plain'}-{int(rng.random() ** 2 * self.settings.names)}"  # some are hot
            [wait], ttl = rng.choices(list(WAITS), list(WAITS.values())), rng.choice(TTLS)
            try:
                if self.hold(tables[fencing].acquire(name, wait=wait, ttl=ttl, owner=label), ttl, rng):
                    left.discard(name)
                else:
                    left.add(name)
            except LockHeld as held:
                if held.holder and held.holder.owner.startswith(f"{label}/") and name not in left:
                    self.log.write("error", f"refused by itself: {held}")
            except Exception as error:  # the parent judges it
                left.add(name)
                if not is_loss(error):
                    self.log.write("error", repr(error))
            self.operations[number] = turn % 256

    def hold(self, lease: Lease, ttl: float, rng: random.Random) -> bool:
        """Do some work under a lease, in one of the ways in which programs do it; whether it was released."""
        [style] = rng.choices(list(STYLES), list(STYLES.values()))
        try:
            if style == "beating":
                with lease.heartbeat():
                    self.work(lease, 1.5 * ttl)
            elif style == "overstayed":
                self.work(lease, ttl + rng.random())
            self.work(lease, rng.uniform(0, PIECE_SECONDS))
            if style == "renewed" or (style == "overstayed" and rng.random() < 0.5):
                for _ in range(rng.randint(1, 4)):
                    lease.renew(rng.choice(TTLS))
                    self.work(lease, rng.uniform(0, 2 * PIECE_SECONDS))
        except LockLost:
            self.work(lease, 0)  # it must say so too
        except Exception as error:
            if not is_loss(error):
                raise
        if style == "abandoned":
            return False
        try:
            lease.release()
        except (ClientError, BotoCoreError):
            lease.release()
        return True

    def work(self, lease: Lease, seconds: float) -> None:
        """Look whether the lock is held before and after each piece of work."""
        ends = time.monotonic() + seconds
        while True:
            now = time.monotonic()  # before the look: what it finds was so then, be it stopped in between or not
            seen = "held" if lease.held else "lapsed"
            self.log.write(seen, now, lease.key, lease.owner, lease.fencing_token or 0)
            if now >= ends:
                return
            time.sleep(min(PIECE_SECONDS, ends - now))

    def break_exchange(self, request: Any, **_: Any) -> Any:
        """Lose the reply, or be late with the request; else leave all to botocore."""
        chance = self.random.random()
        if chance < LOST:
            self.direct.send(request)
            self.log.write("lost")
            if chance < LOST / 3:
                body = json.dumps({"__type": LOST_CODE}).encode()
                return AWSResponse(request.url, 500, {}, SimpleNamespace(stream=lambda: [body]))
            raise self.random.choice((ReadTimeoutError, ConnectionClosedError))(endpoint_url=request.url)
        # A late acquisition may leave an item that nobody holds, for as long as a wrong clock says.
        if chance < LOST + LATE and b"attribute_not_exists(LockID)" not in request.body:
            self.log.write("late")
            threading.Timer(self.random.uniform(0, LATE_SECONDS), self.direct.send, [request]).start()
            raise ReadTimeoutError(endpoint_url=request.url)
        return None

    def age_date(self, response_dict: dict[str, Any], **_: Any) -> None:
        """Make a reply's date a second older, as a server may that keeps it for a while."""
        headers = response_dict["headers"]
        if "Date" in headers and self.random.random() < 0.5:
            date = email.utils.parsedate_to_datetime(headers["Date"]).timestamp()
            headers["Date"] = email.utils.formatdate(date - 1, usegmt=True)


def is_loss(error: Exception) -> bool:
    """Whether it is what a lost reply or a late request looks like."""
    if isinstance(error, ClientError):
        return error.response["Error"]["Code"] == LOST_CODE
    return isinstance(error, (ReadTimeoutError, ConnectionClosedError))


class Supervisor:
    """Forks contenders, one after the other, and sees to their ends."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.log = settings, Log(settings.log)
        self.random = random.Random(f"{settings.seed}/{settings.number}")
        self.operations = mmap.mmap(-1, settings.threads)  # shared with the contender: each thread's turns
        first = list(FATES)[settings.number % len(FATES)]  # so that a short run has seen them all
        self.fates = itertools.chain([first], iter(self.fate, None))

    def fate(self) -> str:
        """Draw what happens next."""
        fates = FATES | ({"step": sum(FATES.values())} if self.settings.clock else {})
        return self.random.choices(list(fates), list(fates.values()))[0]

    def run(self) -> None:
        """Fork contenders until standard input ends."""
        for kind in ("faketime_shm", "sem.faketime_sem"):  # libfaketime has them open, and leaves them when killed
            Path("/dev", "shm", f"{kind}_{os.getpid()}").unlink(missing_ok=True)
        engines.make_client(self.settings).close()  # botocore's models are then read, and forked with us
        supervisor = os.getpid()
        for life in itertools.count():
            self.operations[:] = bytes(self.settings.threads)
            pid = os.fork()
            if pid == 0:
                try:
                    if engines.tied_to(supervisor):
                        Contender(self.settings, life, self.log, self.operations).live()
                except BaseException as error:
                    self.log.write("error", repr(error))
                finally:
                    os._exit(2)
            if not self.see_to(pid):
                return

    def see_to(self, pid: int) -> bool:
        """Do to a contender what fate has for it, until it is dead; whether another is wanted."""
        while True:
            self.settle()
            ending = bool(select.select([sys.stdin], [], [], self.random.uniform(0.2, 2))[0])
            fate = "kill" if ending else next(self.fates)
            if os.waitpid(pid, os.WNOHANG) != (0, 0):
                self.log.write("error", "a contender ended by itself")
                return False
            self.log.write(fate)
            if fate == "step":
                new = Path(f"{self.settings.clock}.new")
                new.write_text(f"{self.random.choice(STEPS):+d}\n", encoding="utf-8")
                new.replace(self.settings.clock)  # at no moment is it half written
            elif fate == "stop":
                os.kill(pid, signal.SIGSTOP)
                time.sleep(max(TTLS) + self.random.uniform(0.2, 1.5))
                os.kill(pid, signal.SIGCONT)
            else:
                os.kill(pid, signal.SIGKILL if fate == "kill" else signal.SIGUSR1)
                os.waitpid(pid, 0)
                return not ending

    def settle(self) -> None:
        """Wait until every thread has used both of its tables since now.

        By a wall clock that is an hour fast, a first request may write an expiry that is an hour late. The module puts
        that right at once; a process that dies in between leaves it behind, and only time can free the lock.
        """
        before, deadline = self.operations[:], time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            if all((now - then) % 256 >= 3 for then, now in zip(before, self.operations[:], strict=True)):
                return
            time.sleep(0.02)


if __name__ == "__main__":
    Supervisor(Settings(**json.loads(sys.argv[1]))).run()
