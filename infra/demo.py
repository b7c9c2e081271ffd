"""See the lock at work, on a DynamoDB and an S3 that run inside this very process.

    python infra/demo.py

Several worker processes add lines to one S3 object: each reads it, thinks, and writes it back. One
of them is killed (SIGKILL) in between, while it holds the lock. You see the progress; then who held
the lock when, how the dead worker's lease ran out, and who took over; and last, whether all lines
that were written are in the object: with the lock, and in the same rounds without it.

The exit status is 0 when the lock lost no update, else 1. Needs no AWS account and no Docker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import boto3

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))  # show the module of this checkout, installed or not

from simplelock import LockTable  # noqa: E402

BUCKET, KEY = "demo", "report.txt"
TTL = 2.0
THINK = 0.12  # seconds between reading and writing, with the lock and without
OTHER_WORK = 0.3  # seconds between rounds, at most
VICTIM, FATAL_ROUND = 2, 2  # who is killed, and when
WIDTH = 68  # of the time axis; the names beside it take 10 more
LEGEND = "█ holds it   ▓ held it when killed   X killed   ░ its lease runs on"
SPANS = {"released": "█", "killed": "▓", "expired": "░"}  # by what ends them
COLOURS = {"█": 32, "▓X": 31, "░": 33, "▲": 1}
PLAIN = str.maketrans("█▓░▲", "#%.^")  # for where those cannot be shown
TTY = sys.stdout.isatty()


class Event(NamedTuple):
    """What a worker told, or what became of it."""

    worker: int
    what: str
    at: float
    line: str = ""


class Run(NamedTuple):
    """One pass of all rounds: what happened, and the object's lines in the end."""

    title: str
    total: int
    events: list[Event]
    found: list[str]

    def lines(self, what: str) -> list[str]:
        """The lines of the events of one kind, one for each event."""
        return [event.line for event in self.events if event.what == what]

    def lost(self) -> set[str]:
        """The updates that were written and are gone."""
        return set(self.lines("wrote")) - set(self.found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4, help="processes, 2 to 9")
    parser.add_argument("--rounds", type=int, default=5, help="of each worker, 3 or more")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        try:
            work(*options.work)
        except Exception:
            tell(options.work[0], "failed")
            raise
        return 0
    if not 2 <= options.workers <= 9 or options.rounds < 3:
        parser.error("it takes 2 to 9 workers and 3 or more rounds")
    say(f"{options.workers} workers add lines to an S3 object: read it, think, write it back.")
    say(f"One is killed while it holds the lock, whose ttl is {TTL:.0f} seconds.")
    forget_aws_settings()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: stop the workers
    try:
        with serve_aws() as url:
            table = deploy(url)
            say(f"The table of infra/table.yaml is deployed to moto, {url}.\n")
            locked = let_work("With the lock", options, url, table, guarded=True)
            unlocked = let_work("Without it", options, url, table, guarded=False)
    except KeyboardInterrupt:
        say("\nInterrupted; the workers are stopped.")
        return 130
    show_timeline(locked, options.workers)
    return show_tally(locked, unlocked)


def forget_aws_settings() -> None:
    """Keep the user's AWS settings, credentials and web proxy out, here and in the workers."""
    for name in list(os.environ):
        if re.match("aws_|.*_proxy$", name, re.IGNORECASE):
            del os.environ[name]
    os.environ |= {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo"}
    os.environ |= {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "*"}


@contextlib.contextmanager
def serve_aws() -> Iterator[str]:
    """Run moto's server in this process, and say where."""
    from moto.dynamodb.responses import DynamoHandler
    from moto.server import ThreadedMotoServer

    mutex, call_action = threading.Lock(), DynamoHandler.call_action

    def call_action_alone(handler: Any) -> Any:
        with mutex:  # moto, unlike DynamoDB, can let two conditional writes win at once
            return call_action(handler)

    DynamoHandler.call_action = call_action_alone
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield "http://{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()


def deploy(url: str) -> str:
    """Make the bucket and the stack; return the name of the stack's table."""
    boto3.client("s3", endpoint_url=url).create_bucket(Bucket=BUCKET)
    cloudformation = boto3.client("cloudformation", endpoint_url=url)
    template = HERE.with_name("table.yaml").read_text(encoding="utf-8")
    cloudformation.create_stack(StackName="locks", TemplateBody=template, Capabilities=["CAPABILITY_IAM"])
    cloudformation.get_waiter("stack_create_complete").wait(StackName="locks")
    outputs = cloudformation.describe_stacks(StackName="locks")["Stacks"][0]["Outputs"]
    return next(each["OutputValue"] for each in outputs if each["OutputKey"] == "TableName")


def tell(number: int, what: str, line: str = "") -> None:
    """As a worker, report to the parent."""
    message = json.dumps([number, what, time.time(), line]) + "\n"
    os.write(sys.stdout.fileno(), message.encode())  # in one piece: the workers share this pipe


def work(number: int, rounds: int, url: str, table: str, guarded: bool) -> None:
    """Do a worker's rounds, in a process of its own."""

    def add(line: str, check: Callable[[], None]) -> None:
        text = s3.get_object(Bucket=BUCKET, Key=KEY)["Body"].read().decode()
        time.sleep(THINK)
        if (number, done + 1) == (VICTIM, FATAL_ROUND):
            tell(number, "doomed")
            sys.stdin.read()  # until the kill
        check()
        s3.put_object(Bucket=BUCKET, Key=KEY, Body=f"{text}{line}\n".encode())
        tell(number, "wrote", line)

    s3 = boto3.client("s3", endpoint_url=url)
    locks = LockTable(table, client=boto3.client("dynamodb", endpoint_url=url), ttl=TTL)
    tell(number, "ready")
    for done in range(rounds):
        if done in (0, rounds - 1) and not sys.stdin.readline():
            return  # the parent is gone
        line = f"worker {number}, round {done + 1}"
        if guarded:
            with locks.acquire(KEY, wait=math.inf) as lease, lease.heartbeat():
                tell(number, "acquired")
                add(line, lease.check)
                tell(number, "released")
        else:
            add(line, lambda: None)
        time.sleep(random.uniform(0, OTHER_WORK))


def let_work(title: str, options: argparse.Namespace, url: str, table: str, *, guarded: bool) -> Run:
    """Let all workers do their rounds from start to end."""
    s3 = boto3.client("s3", endpoint_url=url)
    s3.put_object(Bucket=BUCKET, Key=KEY, Body=b"")
    locks = LockTable(table, client=boto3.client("dynamodb", endpoint_url=url))
    run = Run(title, (options.workers - 1) * options.rounds + FATAL_ROUND - 1, [], [])
    show_progress(run)
    with contextlib.ExitStack() as stack:
        inlet, outlet = os.pipe()
        told = stack.enter_context(os.fdopen(inlet, encoding="utf-8"))
        workers = {}
        with os.fdopen(outlet, "wb"):
            for number in range(1, options.workers + 1):
                task = json.dumps([number, options.rounds, url, table, guarded])
                workers[number] = stack.enter_context(started(["--work", task], outlet))
        watch(run, workers, told, locks)
        if any(workers[number].wait() for number in workers if number != VICTIM):
            sys.exit("A worker was killed that should not be.")
    run.found.extend(s3.get_object(Bucket=BUCKET, Key=KEY)["Body"].read().decode().splitlines())
    return run


def watch(run: Run, workers: dict[int, Any], told: Iterable[str], locks: LockTable) -> None:
    """Note what the workers tell, to the end, and kill one of them."""
    for message in told:
        event = Event(*json.loads(message))
        run.events.append(event)
        if event.what == "failed":
            workers[event.worker].wait()  # so that its traceback comes first
            sys.exit(f"\nWorker {event.worker} failed.")
        if event.what == "doomed":
            workers[VICTIM].kill()
            workers[VICTIM].wait()
            run.events.append(Event(VICTIM, "killed", time.time()))
            if holder := locks.holder(KEY):
                run.events.append(Event(VICTIM, "expired", holder.expires_at))
        if event.what == "doomed" or len(run.events) == len(workers):
            # All begin together; their last round waits for the kill, for one has to take over.
            for worker in workers.values():
                if worker.poll() is None:
                    worker.stdin.write(b"go\n")
        show_progress(run)
    if TTY:
        say("")


@contextlib.contextmanager
def started(arguments: list[str], output: int) -> Iterator[Any]:
    """Start this file in a new process, and stop that in the end."""
    process: Any = subprocess.Popen(
        [sys.executable, str(HERE), *arguments],
        stdin=subprocess.PIPE,
        stdout=output,
        bufsize=0,
        start_new_session=True,  # Ctrl-C is for the parent
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


def show_progress(run: Run) -> None:
    """Show how far it is: on a terminal in one line, elsewhere in a few."""
    last, done = run.events[-1].what if run.events else "begun", len(run.lines("wrote"))
    bar = "█" * (12 * done // run.total)
    text = f"{run.title:14}{bar:░<12} {done:2} of {run.total} updates"
    if run.lines("killed"):
        text += f"; worker {VICTIM} killed"
    if last == "expired":
        text += ", lease runs on"
    if TTY:
        say(f"\r{text:79}", end="")
    elif last in ("begun", "killed", "expired") or (last == "wrote" and done == run.total):
        say(text)


def show_timeline(run: Run, workers: int) -> None:
    """Draw who held the lock when, a row for each worker, and say when it was taken over."""
    events = sorted((e for e in run.events if e.what in ("acquired", *SPANS)), key=lambda e: e.at)
    begin, length = events[0].at, events[-1].at - events[0].at

    def column(at: float) -> int:
        return int((at - begin) / length * (WIDTH - 1))

    rows = {number: [" "] * WIDTH for number in range(1, workers + 1)}
    since: dict[int, int] = {}
    notes: list[tuple[int, str]] = []
    expiry = 0.0
    for number, what, at, _ in events:
        start, end = since.get(number, 0), column(at)
        since[number] = end
        if what in SPANS:
            span = SPANS[what] * max(end - start, 1)
            rows[number][start : start + len(span)] = span
        if what == "killed":
            notes.append((end, f"worker {number} is killed"))
        elif what == "expired":
            rows[number][start], expiry = "X", at
            notes.append((end, "its lease expires"))
        elif what == "acquired" and expiry:
            notes.append((end, f"worker {number} takes over, {at - expiry:.2f} s after expiry"))
            expiry = 0.0
    axis = ""
    for second in range(0, int(length) + 1, 1 + int(length / 12)):
        axis = axis.ljust(column(begin + second)) + str(second)
    say(f"\nWho held the lock when\n\n{'':10}{axis} s")
    for number, row in rows.items():
        say(f"worker {number}  {''.join(row)}".rstrip())
    for end, note in notes:
        line = f"{'':{end + 10}}▲ {note}"
        say(line if len(line) < 80 else f"{note} ▲".rjust(end + 11))
    say(f"\n{'':10}{LEGEND}")


def show_tally(locked: Run, unlocked: Run) -> int:
    """Show how many updates were written, and how many are there; 1 if the lock lost one."""
    say(f"\n{'Updates':13}  written  in the object  lost")
    for run in (locked, unlocked):
        written, found, lost = len(run.lines("wrote")), len(run.found), len(run.lost())
        say(f"{run.title:13}{written:9}{found:15}{lost:6}")
    if locked.lost():
        say("\nThe lock failed: one worker wrote over what another had written.")
        return 1
    say("\nWith the lock every update is there, though one of its holders was killed.")
    return 0


def say(text: str, end: str = "\n") -> None:
    """Print, in colour where that is wanted, with plain characters where it must be."""
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        text = text.translate(PLAIN)
    if TTY and not os.environ.get("NO_COLOR"):
        for marks, code in COLOURS.items():
            text = re.sub(f"[{marks}]+", f"\33[{code}m\\g<0>\33[m", text)
    print(text, end=end, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
