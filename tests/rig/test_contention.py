"""Many processes on few names, each by another wall clock, while they are stopped, killed and cut off.

SIMPLELOCK_RIG_HOLDS is the number of holds over all engines, SIMPLELOCK_RIG_SECONDS the most that they may take on
one engine, and SIMPLELOCK_RIG_SEED what the contenders draw from. For a look of half a minute:

    SIMPLELOCK_RIG_HOLDS=500 python -m pytest --no-cov -m rig tests/rig/test_contention.py
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import simplelock
from simplelock import LockHeld, LockTable

from . import engines
from .contender import FATES, SETTLE_SECONDS, TTLS, Settings

HOLDS = int(os.environ.get("SIMPLELOCK_RIG_HOLDS", "10500"))
SECONDS = float(os.environ.get("SIMPLELOCK_RIG_SECONDS", "180"))
SEED = os.environ.get("SIMPLELOCK_RIG_SEED") or secrets.token_hex(4)
SHARES = {"moto": 0.06, "ministack": 0.47, "dynalite": 0.47}  # of the holds; moto is slow
NAMES, THREADS = 24, 4  # of each kind, with and without fencing tokens; and of each process
CLOCKS = (3600, -3600, 20, -20, None)  # seconds by which a process's wall clock is off; None: it steps
EVENTS = (*FATES, "lost")  # a run without one of them proves too little
END_SECONDS = SETTLE_SECONDS + 25


@dataclass
class Span:
    """A time in which a lease said that it is held, from the first to the last look."""

    name: str
    owner: str
    token: int
    start: float
    end: float


class Ledger:
    """What the contenders report, and what must not be in it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._open: dict[str, Span] = {}  # by owner
        self._rest = ""

    @property
    def holds(self) -> int:
        """Leases that were held."""
        return len({span.owner for span in self.spans})

    def read(self, text: str) -> None:
        """Take in what the log has more."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            event, _, rest = line.partition(" ")
            self.counts[event] += 1
            if event == "error":
                self.errors.append(rest)
            elif event in {"held", "lapsed"}:
                at, name, owner, token = rest.split()
                self.look(event == "held", float(at), name, owner, int(token))

    def look(self, held: bool, at: float, name: str, owner: str, token: int) -> None:
        """Take in what a lease said."""
        if not held:
            self._open.pop(owner, None)
        elif owner in self._open:
            self._open[owner].end = at
        else:
            self._open[owner] = Span(name, owner, token, at, at)
            self.spans.append(self._open[owner])

    def faults(self) -> dict[str, list[Any]]:
        """Spans of one name that overlap, tokens that fall, and errors."""
        spans = sorted(self.spans, key=lambda span: (span.name, span.start))
        pairs = [(a, b) for a, b in itertools.pairwise(spans) if a.name == b.name and a.owner != b.owner]
        return {
            "overlaps": [(a, b) for a, b in pairs if b.start <= a.end],
            "falling tokens": [(a, b) for a, b in pairs if a.token and b.token <= a.token],
            "errors": self.errors,
        }


def by_clock(clock: int | None, file: Path) -> dict[str, str]:
    """What gives a child another wall clock, and leaves the monotonic one as it is."""
    package = importlib.util.find_spec("libfaketime")  # found, not imported: it would bring two packages more
    if not (sys.platform == "linux" and package and package.origin):
        command = "not for this system" if sys.platform != "linux" else "python -m pip install libfaketime"
        reason = f"libfaketime is not installed: {command}"
        if os.environ.get("SIMPLELOCK_RIG_REQUIRE"):
            raise RuntimeError(reason)
        pytest.skip(reason)
    library = Path(package.origin).parent / "vendor/libfaketime/src/libfaketime.so.1"
    settings = {"LD_PRELOAD": str(library), "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    if clock is not None:
        return settings | {"FAKETIME": f"{clock:+d}"}
    file.write_text("+0\n", encoding="utf-8")
    return settings | {"FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_NO_CACHE": "1"}


@contextlib.contextmanager
def contenders(engine: engines.Engine, table: str, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run a worker by each clock; none is left when the block ends."""
    workers: list[subprocess.Popen[bytes]] = []
    path = [str(Path(__file__).parents[1]), str(Path(simplelock.__file__).parent)]
    try:
        for number, clock in enumerate(CLOCKS):
            file = folder / "clock"
            settings = Settings(
                url=engine.url,
                table=table,
                log=str(folder / "log"),
                seed=SEED,
                number=number,
                names=NAMES,
                threads=THREADS,
                clock=str(file) if clock is None else None,
            )
            workers.append(
                subprocess.Popen(
                    engines.leashed([sys.executable, "-m", "rig.contender", json.dumps(asdict(settings))]),
                    env={**os.environ, **by_clock(clock, file), "PYTHONPATH": os.pathsep.join(path)},
                    stdin=subprocess.PIPE,
                    start_new_session=True,  # also a group, so that what it forked can be ended with it
                )
            )
        yield workers
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.stdin.close()
            worker.wait()


def test_contention(
    engine: engines.Engine, make_client: Any, table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most one holds a name, tokens never fall, and every name is free again by ttl + 3 s after the last death."""
    began, wanted, ledger = time.monotonic(), SHARES[engine.name] * HOLDS, Ledger()
    log = tmp_path / "log"
    log.touch()
    with contenders(engine, table, tmp_path) as workers, log.open(encoding="utf-8") as lines:
        while time.monotonic() < began + SECONDS and not any(ledger.faults().values()):
            time.sleep(0.5)
            ledger.read(lines.read())
            if ledger.holds >= wanted and all(ledger.counts[event] for event in EVENTS):
                break
        for worker in workers:
            worker.stdin.close()
        statuses = [worker.wait(END_SECONDS) for worker in workers]
        ledger.read(lines.read())

    free_at = time.monotonic() + max(TTLS) + 3
    client = make_client(engine)
    tables = {fencing: LockTable(table, client=client, ttl=1, fencing=fencing) for fencing in (False, True)}

    def take(name: str) -> str | None:
        left = max(0.0, free_at - time.monotonic())
        try:
            with tables[name.startswith("fenced")].acquire(name, wait=left) as lease:
                ledger.look(lease.held, time.monotonic(), name, lease.owner, lease.fencing_token or 0)
        except LockHeld as held:
            return str(held)
        return None

    names = [f"{kind}-{number}" for kind in ("plain", "fenced") for number in range(NAMES)]
    stuck: list[str] = []
    if not any(ledger.faults().values()):
        with ThreadPoolExecutor(len(names)) as pool:
            stuck = [found for found in pool.map(take, names) if found]

    faults, counts = ledger.faults(), ledger.counts
    summary = (
        f"{engine.name}: {ledger.holds} holds, {counts['crash']} crashes, {counts['kill']} kills,"
        f" {counts['stop']} stops, {counts['step']} clock steps, {counts['lost']} lost replies,"
        f" {counts['late']} late requests, {len(faults['overlaps'])} overlaps,"
        f" {len(faults['falling tokens'])} falling tokens, {time.monotonic() - began:.0f} s, seed {SEED}"
    )
    with capsys.disabled():
        print(f"\n{summary}")
    for what, found in faults.items():
        assert not found, f"{what}: {found[:3]}; {summary}"
    assert not stuck, f"{stuck}; {summary}"
    assert statuses == [0] * len(CLOCKS), summary
    assert ledger.holds >= wanted, f"too slow: {summary}"
    assert all(counts[event] for event in EVENTS), f"too tame: {summary}"
