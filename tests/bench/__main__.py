"""Measure all clients side by side, and print what was found as tables in Markdown."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import hashlib
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import time
import venv
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from tests.rig import engines

from .clients import CLIENTS, OURS, WAITERS

ROOT = Path(__file__).parents[2]
CHART = Path(__file__).with_name("chart.svg")
WRITE, READ = 0.625e-6, 0.125e-6  # $ in us-east-1, on demand; half of it where a read may be stale
WAITS, TRIES, LATER = "waits from its death on", "tries every 0.1 s", "comes later"
PATIENCE = 6  # ttls that one who tries goes on for
READS = {"GetItem": READ / 2, "GetItem consistent": READ}
COLD = (
    "import sys, time; from tests.bench.clients import CLIENTS;"
    "CLIENTS[sys.argv[1]].cycle(sys.argv[2])(lambda: print(time.time()))"
)
IMPORT = (
    "import time, botocore.session; start = time.perf_counter(); import simplelock;print(time.perf_counter() - start)"
)

Rows = list[list[str]]


class Sizes(NamedTuple):
    """How much of everything."""

    rounds: int = 40
    cycles: int = 100  # a round
    starts: int = 15
    deaths: int = 5
    ttl: int = 4  # of the dead and of those waited for
    waiting: float = 10
    waiters: int = 50
    hand_overs: int = 20
    leases: tuple[int, ...] = (10, 100, 1000)
    beating: float = 31
    threads: tuple[int, ...] = (1, 2, 4, 8, 16)
    running: float = 5
    locks: tuple[int, ...] = (10, 1_000, 100_000)


QUICK = Sizes(
    rounds=3,
    cycles=20,
    starts=2,
    deaths=1,
    ttl=2,
    waiting=2,
    waiters=5,
    hand_overs=2,
    leases=(10, 100),
    beating=8,
    threads=(1, 4),
    running=1,
    locks=(10, 1_000),
)


class Bench:
    """The parts. All but the cycles without network use one engine, over HTTP."""

    def __init__(self, python: str, sizes: Sizes, engine: engines.Engine) -> None:
        self.python, self.sizes, self.engine = python, sizes, engine
        self.tables = 0
        self.chart: list[tuple[str, float, float]] = []

    def cycle(self) -> Iterator[tuple[str, Rows]]:
        """Time uncontended cycles, all clients in turn."""
        offline, online = self._cycles(offline=True), self._cycles(offline=False)
        rows = []
        for name, client in CLIENTS.items():
            requests = statistics.median(block["requests"] for block in online[name])
            ratio = _ratio(offline, name, "cpu")
            rows.append(
                [
                    client.title,
                    (client.package or "").rpartition("=")[2],
                    f"{requests:g}",
                    *_costs(offline, name, "cpu"),
                    *_costs(online, name, "cpu"),
                    *_costs(online, name, "wall"),
                ]
            )
            self.chart.append((client.title, statistics.median(ratio), requests))
        yield (
            "A cycle: median (quartiles) in µs, and as a multiple of the bare client",
            [
                [
                    *("", "version", "requests"),
                    *("CPU, no network", "x", "CPU, HTTP", "x", "wall, HTTP", "x"),
                ],
                *rows,
            ],
        )

    def _cycles(self, *, offline: bool) -> dict[str, list[dict[str, float]]]:
        results: dict[str, list[dict[str, float]]] = {name: [] for name in CLIENTS}
        with contextlib.ExitStack() as stack:
            workers = {name: stack.enter_context(self._worker(name, offline=offline)) for name in CLIENTS}
            for worker in workers.values():
                worker.call("start")
            for _ in range(self.sizes.rounds):
                for name, worker in random.sample(list(workers.items()), len(workers)):
                    results[name].append(worker.call("cycles", count=self.sizes.cycles))
        return results

    def cold(self) -> Iterator[tuple[str, Rows]]:
        """Time fresh processes to their first lock, and the module's import."""
        names = [name for name in CLIENTS if name not in ("replay", "heartbeat")]
        tables = {name: self._table(CLIENTS[name].keys) for name in names}
        times: dict[str, list[float]] = {name: [] for name in names}
        imports = []
        for number in range(-1, self.sizes.starts):  # the first only warms the disk up
            for name in random.sample(names, len(names)):
                start = time.time()
                took = float(self._run(COLD, name, tables[name])) - start
                times[name] += [took * 1e3] * (number >= 0)
            imports += [float(self._run(IMPORT)) * 1e3] * (number >= 0)
        yield (
            "Cold start, over HTTP: from the start of a process to its first lock, in ms",
            [["", "median", "quartiles"]]
            + [[CLIENTS[name].title, *_median(times[name])] for name in names]
            + [["import simplelock, after botocore.session", *_median(imports, 1)]],
        )

    def dead(self) -> Iterator[tuple[str, Rows]]:
        """Time how long the lock of a dead holder stays locked."""
        ttl, ways = self.sizes.ttl, (WAITS, TRIES, LATER)
        rows = []
        for name in WAITERS:
            for way in ways:
                after_ttl, after_expiry = [], []
                for _ in range(self.sizes.deaths):
                    held, acquired = self._succeed(name, way, ttl)
                    if acquired is None:
                        break
                    after_ttl.append(acquired - held["acquired"] - ttl)
                    after_expiry.append(acquired - held["expires"])
                if after_ttl:
                    rows.append([name, way, *_median(after_expiry, 2), *_median(after_ttl, 2)])
                else:
                    rows.append([name, way, *[f"never in {PATIENCE * ttl} s", ""] * 2])
        for name in ("Java client", "Go client (dynamolock)"):
            rule = "as documented: when it has seen the record unchanged for a whole ttl"
            rows.append([name, rule, *[f"0 to {ttl}", ""] * 2])
        yield (
            f"A dead holder, ttl {ttl} s: s to the next ({LATER}: {ttl / 2:g} s after the expiry)",
            [
                ["", "the next", "after the expiry", "quartiles", "after the ttl", "quartiles"],
                *rows,
            ],
        )

    def _succeed(self, name: str, way: str, ttl: int) -> tuple[dict[str, float], float | None]:
        table = self._table(CLIENTS[name].keys)
        with self._worker(name, table=table) as heir:
            with self._worker(name, table=table) as holder:
                held = holder.call("hold", ttl=ttl)  # and is killed at the end of this block
            if way == TRIES:
                return held, heir.call("take_trying", ttl=ttl, pause=0.1, seconds=PATIENCE * ttl)
            if way == LATER:
                later = held["expires"] + ttl / 2
                time.sleep(later - time.time())
                held = {"acquired": later - ttl, "expires": later}  # it counts from its coming on
            return held, heir.call("take", ttl=ttl)

    def waiting(self) -> Iterator[tuple[str, Rows]]:
        """Count what waiting costs, and time who gets the lock next."""
        sizes, ttl = self.sizes, 30
        rows = []
        for name in WAITERS:
            for count in (1, sizes.waiters):
                table = self._table(CLIENTS[name].keys)
                with self._worker(name, table=table) as holder:
                    holder.call("hold", ttl=ttl)
                    with self._worker(name, table=table) as worker:
                        sent = worker.call("wait_in_vain", ttl=ttl, count=count, seconds=sizes.waiting)
                price = sum(number * READS.get(kind, WRITE) for kind, number in sent.items())
                kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(sent.items()))
                rows.append([name, f"{count}", kinds, f"{price * 1e6:.1f}"])
        yield (
            f"Waiting {sizes.waiting:g} s in vain: requests, and their price in millionths of $",
            [["", "waiters", "requests", "price"], *rows],
        )
        rows = []
        for name in WAITERS:
            with self._worker(name) as worker:
                delays = worker.call("hand_over", ttl=ttl, count=sizes.hand_overs)
            rows.append([name, *_median(delays, 2), f"{max(delays):.2f}"])
        yield (
            f"{sizes.hand_overs} hand-overs: s from a release to the next, who waited for 2 to 3 s",
            [["", "median", "quartiles", "longest"], *rows],
        )
        with self._worker("simplelock") as worker:
            waits = worker.call("queue", ttl=ttl, count=sizes.waiters)
        yield (
            f"{len(waits)} waiters, one by one: s from the first release to each one's turn",
            [
                ["", "median", "quartiles", "longest"],
                ["simplelock", *_median(waits, 2), f"{max(waits):.2f}"],
            ],
        )

    def leases(self) -> Iterator[tuple[str, Rows]]:
        """Hold many leases with heartbeats in one process."""
        rows, ttl = [], 10
        for count in self.sizes.leases:
            with self._worker("simplelock") as worker:
                found = worker.call("leases", count=count, ttl=ttl, seconds=self.sizes.beating)
            rows.append(
                [
                    f"{count}",
                    f"{found['due']}",
                    f"{found['done']}",
                    f"{found['longest']:.0%}",
                    f"{found['lost']}",
                    f"{found['threads']}",
                    f"{found['memory']:.0f}",
                    f"{found['cpu']:.0f}",
                    f"{found['bare']:.0f}",
                    f"{found['cpu'] / found['bare']:.2f}",
                ]
            )
        yield (
            f"Leases with heartbeats in one process, ttl {ttl} s, for {self.sizes.beating:g} s",
            [
                [
                    *("leases", "renewals due", "done", "longest gap, of the ttl", "lost"),
                    *("threads", "MB", "CPU per renewal, µs", "bare, µs", "x"),
                ],
                *rows,
            ],
        )

    def growth(self) -> Iterator[tuple[str, Rows]]:
        """See what more threads and more locks do."""
        rows = [["", *(f"{count} threads" for count in self.sizes.threads)]]
        for name in ("bare", "simplelock"):
            with self._worker(name) as worker:
                worker.call("start")
                rates = [
                    worker.call("threads", count=count, seconds=self.sizes.running) for count in self.sizes.threads
                ]
            rows.append([CLIENTS[name].title, *(f"{rate:.0f}" for rate in rates)])
        yield "Cycles per second on one table object, over HTTP", rows
        rows = [["locks", "pages", "seconds", "MB more than for two pages"]]
        for count in self.sizes.locks:
            table = self._table(OURS)
            with self._worker("simplelock", table=table) as worker:
                worker.call("fill", count=count)
            with self._worker("simplelock", table=table) as worker:
                found = worker.call("holders")
            if found["locks"] != count:
                raise AssertionError(f"{found['locks']} of {count} locks were listed")
            rows.append(
                [
                    f"{count:,}",
                    f"{found['pages']}",
                    f"{found['wall']:.2f}",
                    f"{found['memory']:.1f}",
                ]
            )
        yield "holders()", rows

    @contextlib.contextmanager
    def _worker(self, name: str, *, offline: bool = False, table: str = "") -> Iterator[Worker]:
        if not offline:
            table = table or self._table(CLIENTS[name].keys)
        arguments = [name, table or "Locks"] + ["--offline"] * offline
        process = subprocess.Popen(
            [self.python, "-m", "tests.bench.worker", *arguments],
            cwd=ROOT,
            env=self._environment(offline=offline),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                yield Worker(process)
            finally:
                process.kill()

    def _run(self, code: str, *arguments: str) -> str:
        command = [self.python, "-c", code, *arguments]
        environment = self._environment(offline=False)
        return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout

    def _environment(self, *, offline: bool) -> dict[str, str]:
        """Nothing of the user's settings, and credentials that open nothing."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "PYTHON"))}
        endpoint = {} if offline else {"AWS_ENDPOINT_URL_DYNAMODB": self.engine.url}
        return (
            kept
            | endpoint
            | {
                "AWS_ACCESS_KEY_ID": "rig",
                "AWS_SECRET_ACCESS_KEY": "rig",
                "AWS_DEFAULT_REGION": engines.REGION,
                "AWS_CONFIG_FILE": os.devnull,
                "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
                "AWS_EC2_METADATA_DISABLED": "true",
                "NO_PROXY": "127.0.0.1",
            }
        )

    def _table(self, keys: dict[str, str]) -> str:
        self.tables += 1
        name = f"bench-{self.tables}"
        client = engines.make_client(self.engine)
        client.create_table(
            TableName=name,
            BillingMode="PAY_PER_REQUEST",
            KeySchema=[
                {"AttributeName": key, "KeyType": kind} for key, kind in zip(keys, ("HASH", "RANGE"), strict=False)
            ],
            AttributeDefinitions=[{"AttributeName": key, "AttributeType": kind} for key, kind in keys.items()],
        )
        patience = {"Delay": 0.02, "MaxAttempts": 500}
        client.get_waiter("table_exists").wait(TableName=name, WaiterConfig=patience)
        client.close()
        return name


class Worker:
    """The other end of `worker`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def call(self, method: str, **arguments: Any) -> Any:
        """Have it do something; wait for what it returns."""
        print(json.dumps([method, arguments]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker ended during {method}")
        return json.loads(answer)


def environment_with_peers() -> str:
    """Where the Python is that has all clients, with our own boto3; installed on first use."""
    ours = [f"{name}=={version(name)}" for name in ("boto3", "botocore", "urllib3")]
    peers = [client.package for client in CLIENTS.values() if client.package]
    digest = hashlib.sha256(" ".join([*ours, *peers]).encode()).hexdigest()[:8]
    home = engines.CACHE / "simplelock-bench" / f"python{platform.python_version()}-{digest}"
    done, python = home / "installed", home / "bin" / "python"
    if not done.exists():
        venv.create(home, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *ours, *peers], check=True)
        done.touch()  # last, so that an interrupted install is not taken for one
    return str(python)


def draw(figures: list[tuple[str, float, float]]) -> None:
    """Draw the chart: CPU ratio and requests, by client."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "simplelock", "svg.fonttype": "none"})
    titles, ratios, requests = zip(*reversed(figures), strict=True)
    colours = ["#1f6feb" if title.startswith("simplelock") else "#8b949e" for title in titles]
    figure = Figure(figsize=(9, 0.36 * len(titles) + 0.9), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, values, title in (
        (panels[0], ratios, "CPU per cycle, bare client = 1"),
        (panels[1], requests, "requests per cycle"),
    ):
        bars = axes.barh(titles, values, color=colours)
        axes.bar_label(bars, fmt="{:.3g}", padding=3)
        axes.set_title(title, fontsize=11)
        axes.set_xticks([])
        axes.margins(x=0.15)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(left=False)
    figure.savefig(CHART, metadata={"Date": None}, facecolor="white")


def _costs(results: dict[str, list[dict[str, float]]], name: str, figure: str) -> list[str]:
    values = [block[figure] for block in results[name]]
    return [" ".join(_median(values)), f"{statistics.median(_ratio(results, name, figure)):.2f}"]


def _ratio(results: dict[str, list[dict[str, float]]], name: str, figure: str) -> list[float]:
    """Round by round, to the bare client: what slows the machine down, slows both."""
    pairs = zip(results[name], results["bare"], strict=True)
    return [block[figure] / bare[figure] for block, bare in pairs]


def _median(values: list[float], digits: int = 0) -> list[str]:
    low, middle, high = statistics.quantiles([*values, *values], n=4)  # of one value, too
    return [f"{middle:.{digits}f}", f"({low:.{digits}f} to {high:.{digits}f})"]


def _markdown(rows: Rows) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield f"| {' | '.join(cells)} |"
        if number == 0:
            yield f"|{'|'.join('-' * (width + 2) for width in widths)}|"


def main() -> None:
    """Run the parts that are asked for."""
    parts = ("cycle", "cold", "dead", "waiting", "leases", "growth")
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("part", nargs="*", help=f"of {', '.join(parts)}; all by default")
    parser.add_argument("--quick", action="store_true", help="to see that it works, not to measure")
    options = parser.parse_args()
    if unknown := set(options.part) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if not options.quick and importlib.util.find_spec("matplotlib") is None:
        parser.error("the chart needs matplotlib: pip install -e '.[bench]'")
    engines.install("ministack")
    python = environment_with_peers()
    day = dt.datetime.now(dt.timezone.utc).date()
    machine = f"{os.cpu_count()} CPUs, {platform.system()} {platform.machine()}"
    print(f"{day}, {machine}, Python {platform.python_version()}, boto3 {version('boto3')}")
    with engines.running("ministack") as engine:
        bench = Bench(python, QUICK if options.quick else Sizes(), engine)
        for part in options.part or parts:
            for title, rows in getattr(bench, part)():
                print(f"\n{title}\n", *_markdown(rows), sep="\n", flush=True)
    if bench.chart and not options.quick:
        draw(bench.chart)


if __name__ == "__main__":
    main()
