"""The command line: its texts in this process, and what it makes of processes and signals as a program."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import boto3
import pytest
from botocore import configprovider
from faults import after, refused
from rig import engines
from rig.proxy import Proxy

import simplelock
from simplelock import LockTable, main

ROOT = Path(simplelock.__file__).parent
PROGRAM = [sys.executable, str(ROOT / "simplelock.py")]
VERBS = ("run", "show", "list", "release", "create-table")
NUMBERS = itertools.count(1)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")


def until(condition, seconds=10):
    """Wait for it to come true; whether it did."""
    deadline = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return true


def line(pattern):
    """One line of the program's own that has this in it, and nothing else."""
    return re.compile(rf"simplelock: [^\n]*{pattern}[^\n]*\n")


# In this process: what is said, and what is sent


@pytest.fixture
def here(client, monkeypatch):
    """Let the program use the in-process DynamoDB, and give back the signals that it handles."""
    monkeypatch.setattr(simplelock, "_default_client", lambda: client)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def untouched(monkeypatch):
    """Nothing is sent, since there is no client to send it with."""
    monkeypatch.setattr(simplelock, "_default_client", lambda: pytest.fail("it made a client"))


def ends(*arguments):
    """The status with which the program ends, be it by argparse."""
    try:
        return main(arguments)
    except SystemExit as error:
        return error.code


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("", "required: VERB"),
        ("lock a", "lock"),
        ("run", "required: KEY"),
        ("run a", "command"),
        ("run a --", "command"),
        ("run -- true", "required: KEY"),
        ("run a true", "true"),
        ("run a b -- true", "b"),
        ("run --ttl 0 a -- true", "ttl"),
        ("run --ttl nan a -- true", "ttl"),
        ("run --ttl 60000000 a -- true", "seconds|s,"),
        ("run --ttl long a -- true", "ttl"),
        ("run --wait -1 a -- true", "wait"),
        ("run --conflict-exit-code x a -- true", "conflict-exit-code"),
        ("run --conflict-exit-code 256 a -- true", "0 to 255"),
        ("run --conflict-exit-code -1 a -- true", "0 to 255"),
        ("run --forever a -- true", "forever"),
        (f"run {'k' * 2049} -- true", "2048"),
        ("show", "required: KEY"),
        ("show ''", "key"),
        ("list a", "a"),
        ("list --table ''", "name"),
        ("release a", "required: OWNER"),
        ("create-table a", "a"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_sent(untouched, capsys, arguments, complaint):
    """Status 2, the usage, and one line that names what is wrong."""
    assert ends(*shlex.split(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: simplelock")
    assert re.search(rf"error: .*({complaint})", err.splitlines()[-1])


def test_help_names_all_verbs(untouched, capsys):
    """The first help that one sees leads to the others."""
    assert ends("--help") == 0
    out = capsys.readouterr().out
    assert [verb for verb in VERBS if not re.search(rf"^ +{verb}\s", out, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("verb", "status"), [("run", 127), ("show", 1), ("list", 0), ("release", 1), ("create-table", 0)]
)
def test_help_has_an_example_that_works(here, locks, capsys, tmp_path, monkeypatch, verb, status):
    """What the help shows is understood: it fails at most for want of its lock and its command."""
    assert ends(verb, "--help") == 0
    (example,) = re.findall(r"^example: simplelock (.*)$", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert example.split()[0] == verb
    assert ends(*shlex.split(example)) == status


def test_version_is_told(untouched, capsys):
    """It is the module's."""
    assert ends("--version") == 0
    assert capsys.readouterr().out == f"simplelock {simplelock.__version__}\n"


@pytest.mark.parametrize(
    ("variable", "option", "expected"),
    [(None, [], "Locks"), ("", [], "Locks"), ("Ours", [], "Ours"), ("Ours", ["--table", "Mine"], "Mine")],
)
def test_table_is_the_options_or_the_variables_or_locks(here, client, monkeypatch, variable, option, expected):
    """In this order; `create-table` makes it, with TTL, and keeps it when it is there."""
    if variable is not None:
        monkeypatch.setenv("SIMPLELOCK_TABLE", variable)
    assert [ends("create-table", *option), ends("create-table", *option)] == [0, 0]
    assert client.list_tables()["TableNames"] == [expected]
    ttl = client.describe_time_to_live(TableName=expected)["TimeToLiveDescription"]
    assert ttl == {"TimeToLiveStatus": "ENABLED", "AttributeName": "ExpiresAt"}


def test_show_says_who_holds_it_and_for_how_long(here, clock, locks, capsys):
    """A line for people, status 0."""
    lease = locks.acquire("a", ttl=60, owner="web1", data="build 4711")
    assert ends("show", "a") == 0
    seconds = re.fullmatch(
        rf"'a' is held by {lease.owner} \(build 4711\), (\d+) s to its expiry\n", capsys.readouterr().out
    )[1]
    assert 60 <= int(seconds) <= 63


def test_show_says_that_nobody_holds_it(here, locks, capsys):
    """Status 1, in words and for programs."""
    assert [ends("show", "a"), ends("show", "--json", "a")] == [1, 1]
    assert capsys.readouterr().out == "'a' is held by nobody\nnull\n"


def test_show_of_an_expired_lock_does_not_say_that_it_is_held(here, clock, locks, capsys):
    """Who held it last is told, but the lock is free: status 1."""
    lease = locks.acquire("a", ttl=10)
    clock.tick(20)
    assert [ends("show", "a"), ends("show", "--json", "a")] == [1, 1]
    text, shown = capsys.readouterr().out.splitlines()
    assert lease.owner in text
    assert "is held by" not in text
    assert json.loads(shown)["expires_in"] < 0


def test_json_has_the_fields_of_a_holder(here, clock, make_table, capsys):
    """`show` prints an object, `list` an array; what is not there is null."""
    lease = make_table(fencing=True).acquire("b", data="字\n")
    other = make_table().acquire("a", ttl=90)
    assert [ends("show", "--json", "b"), ends("list", "--json")] == [0, 0]
    shown, listed = map(json.loads, capsys.readouterr().out.splitlines())
    keys = ["key", "owner", "expires_at", "expires_in", "fencing_token", "data"]
    assert list(shown) == keys
    assert 60 <= shown.pop("expires_in") <= 63
    assert list(shown.values()) == ["b", lease.owner, lease.expires_at, lease.fencing_token, "字\n"]
    one, two = sorted(listed, key=lambda each: each["key"])
    assert (one["owner"], one["fencing_token"], one["data"]) == (other.owner, None, None)
    assert (two["owner"], list(two)) == (lease.owner, keys)


def test_list_has_a_line_for_each_lock(here, clock, locks, capsys):
    """Key, owner, note, and for how long; nothing for an empty table."""
    assert [ends("list"), ends("list", "--json")] == [0, 0]
    assert capsys.readouterr().out == "[]\n"
    leases = [locks.acquire(key, data=key.upper()) for key in ("a", "b")]
    assert ends("list") == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [re.sub(r"\d+ s", "n s", each) for each in lines] == [
        f"{lease.key}: {lease.owner} ({lease.data}), n s to its expiry" for lease in leases
    ]


def test_release_is_for_the_owner_that_is_named(here, locks, stored, capsys):
    """The whole owner releases it, status 0; another one does not, status 1."""
    lease = locks.acquire("a")
    before = stored()
    label = lease.owner.rpartition("/")[0]
    assert [ends("release", "a", label), ends("release", "b", lease.owner)] == [1, 1]
    assert stored() == before
    assert ends("release", "a", lease.owner) == 0
    assert stored() is None
    assert capsys.readouterr().out.splitlines() == [
        f"'a' is not held by {label}",
        f"'b' is not held by {lease.owner}",
        "released",
    ]


def test_release_of_a_fenced_lock_keeps_its_count(here, make_table):
    """The next token is higher, though nobody told the program of fencing."""
    fenced = make_table(fencing=True)
    lease = fenced.acquire("a")
    assert ends("release", "a", lease.owner) == 0
    assert fenced.holder("a") is None
    assert fenced.acquire("a").fencing_token == lease.fencing_token + 1


@pytest.fixture
def account(monkeypatch):
    """An account's settings, which botocore reads anew."""
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # botocore's, between its tries
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    return monkeypatch


def no_region(account):
    account.delenv("AWS_DEFAULT_REGION")


def no_credentials(account):
    account.delenv("AWS_ACCESS_KEY_ID")
    account.delenv("AWS_SECRET_ACCESS_KEY")


def no_profile(account):
    account.setenv("AWS_PROFILE", "nobody")


def odd_region(account):
    account.setenv("AWS_DEFAULT_REGION", "eu west")


def unreachable(account):
    account.setattr(boto3, "client", functools.partial(boto3.client, endpoint_url="http://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (no_region, "specify a region.*Region"),
        (odd_region, "eu west.*Region"),
        (no_credentials, "locate credentials.*credentials"),
        (no_profile, "nobody.*"),
        (unreachable, "http://127.0.0.1:1/.*endpoint"),
    ],
)
def test_missing_settings_are_one_line(account, capsys, fault, told):
    """What is missing and where to look, and status 69."""
    fault(account)
    assert ends("run", "a", "--", "true") == 69
    out, err = capsys.readouterr()
    assert out == ""
    assert line(told).fullmatch(err)


# In this process: what `run` makes of a lock, with commands that are quick


@pytest.fixture
def ran(tmp_path):
    """Where commands can leave something."""
    return tmp_path / "ran"


@pytest.mark.parametrize(("options", "status"), [([], 75), (["--conflict-exit-code", "0"], 0), (["--quiet"], 75)])
def test_run_says_who_holds_the_lock(here, locks, capsys, ran, options, status):
    """One line, or none, and the status that was asked for; the command does not run."""
    lease = locks.acquire("a", owner="web1", data="build 4711")
    assert ends("run", *options, "a", "--", "touch", str(ran)) == status
    out, err = capsys.readouterr()
    said = line(rf"'a' is held by {lease.owner} \(build 4711\), \d+ s to its expiry")
    assert err == "" if "--quiet" in options else said.fullmatch(err)
    assert out == ""
    assert not ran.exists()


def test_run_waits_for_the_lock(here, locks, meets):
    """It tries again until the lock is free, if need be for ever."""
    lease = locks.acquire("a")
    meets("GetItem", [after(lease.release)])
    assert ends("run", "--wait", "inf", "a", "--", "true") == 0


def test_lock_lost_to_another_ends_the_command(here, locks, steal, stored, meets, capsys):
    """SIGTERM while it runs, then status 70, and the thief's item stays as it was."""
    thefts = []
    meets("UpdateItem", [None, after(lambda: thefts.append(steal()))])
    assert ends("run", "--ttl", "1", "a", "--", "sleep", "60") == 70
    assert line("thief/1 has taken it").fullmatch(capsys.readouterr().err)
    assert stored() == thefts[0]


def test_lock_that_cannot_be_renewed_ends_the_command(here, locks, stored, meets, capsys):
    """It ran out while the command ran: status 70 and why, though nobody took it and its release works."""
    meets("UpdateItem", itertools.chain([None], itertools.repeat(refused("AccessDeniedException"))))
    assert ends("run", "--ttl", "1", "a", "--", "sleep", "60") == 70
    assert line("it ran out, since renewing failed.*AccessDenied").fullmatch(capsys.readouterr().err)
    assert stored() is None


def test_lock_lost_at_the_end_is_told_too(here, locks, steal, stored, meets, capsys):
    """The release finds another's item: status 70, although the command was content."""
    thefts = []
    meets("DeleteItem", [after(lambda: thefts.append(steal()))])
    assert ends("run", "a", "--", "true") == 70
    assert line("'a' is not held by .* any more").fullmatch(capsys.readouterr().err)
    assert stored() == thefts[0]


@pytest.mark.parametrize("error", ["AccessDeniedException", "ResourceNotFoundException"])
def test_release_that_fails_leaves_the_commands_status(here, locks, meets, capsys, error):
    """The command has done its work: its status counts, and what went wrong is told."""
    meets("DeleteItem", [refused(error)] * 3)
    assert ends("run", "a", "--", "sh", "-c", "exit 5") == 5
    assert line(f"could not be released.*{error}").fullmatch(capsys.readouterr().err)


def test_command_is_not_left_alone_without_heartbeats(here, locks, stored, monkeypatch, ran):
    """No thread can be started: the command is ended, and the lock given back."""

    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="thread"):
        main(["run", "a", "--", "sh", "-c", f"sleep 60; touch {ran}"])
    assert stored() is None
    assert not ran.exists()


def test_command_that_cannot_be_executed_is_told_apart(here, locks, stored, capsys, tmp_path):
    """Status 126, as a shell has it, and nothing is left locked."""
    command = tmp_path / "backup"
    command.write_text("not for execution")
    assert ends("run", "a", "--", str(command)) == 126
    assert line("Permission denied.*backup").fullmatch(capsys.readouterr().err)
    assert stored() is None


def test_signal_that_comes_while_the_command_starts_reaches_it(here, locks, stored, monkeypatch):
    """It is passed on once there is something to pass it on to, whichever thread the system gave it to."""
    starting, start, started = threading.Event(), subprocess.Popen, []

    def signal_myself():
        starting.wait(10)
        os.kill(os.getpid(), signal.SIGTERM)

    def signalled(*command, **options):
        starting.set()
        other.join()
        started.append(start(*command, **options))
        return started[0]

    other = threading.Thread(target=signal_myself)
    other.start()
    monkeypatch.setattr(subprocess, "Popen", signalled)
    assert ends("run", "a", "--", "sleep", "60") == 128 + signal.SIGTERM
    assert [command.poll() for command in started] == [-signal.SIGTERM]
    assert stored() is None


def test_signal_that_is_not_permitted_does_no_harm(here, locks, stored, monkeypatch):
    """A command that runs as root, by sudo, is waited for: no error gives its lock back before it ends."""
    monkeypatch.setattr(os, "killpg", not_permitted)
    command = ["sh", "-c", f"kill -TERM {os.getpid()}; sleep 0.2; exit 3"]
    assert ends("run", "a", "--", *command) == 3
    assert stored() is None


def not_permitted(_group, _number):
    raise PermissionError


def test_command_is_not_told_the_token_of_another_lock(here, locks, monkeypatch, capfd):
    """Within another `run` that has a token, the command of one without does not find that one."""
    monkeypatch.setenv("SIMPLELOCK_FENCING_TOKEN", "7")
    assert ends("run", "a", "--", "sh", "-c", 'echo "<$SIMPLELOCK_FENCING_TOKEN>"') == 0
    assert capfd.readouterr() == ("<>\n", "")


def test_systems_without_prctl_run_commands_too(here, locks, monkeypatch):
    """Only Linux has it."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    assert ends("run", "a", "--", "sh", "-c", "exit 3") == 3


# As a program of its own, against a server on loopback


class Ended(NamedTuple):
    """How a program ended."""

    status: int
    out: bytes
    err: str


@pytest.fixture(scope="module")
def engine():
    """A server with DynamoDB."""
    with engines.running("moto") as engine:
        yield engine


@pytest.fixture
def server(engine):
    """A proxy before it, which counts and breaks requests. It leaves no thread behind."""
    threads = set(threading.enumerate())
    with Proxy.before(engine) as proxy:
        yield proxy
    assert until(lambda: set(threading.enumerate()) <= threads)


@pytest.fixture(scope="module")
def direct(engine):
    """A client of the server itself."""
    with contextlib.closing(engines.make_client(engine)) as client:
        yield client


@pytest.fixture
def others(direct):
    """A fresh table's locks, as another host has them."""
    name = f"Locks-{next(NUMBERS)}"
    engines.make_table(direct, name)
    return LockTable(name, client=direct)


@pytest.fixture
def start(server, others, tmp_path, monkeypatch):
    """Start the program. Whatever comes of it, none of its processes may be left in the end."""
    for name, value in {
        "AWS_ENDPOINT_URL_DYNAMODB": server.url,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
        "SIMPLELOCK_TABLE": others.name,
    }.items():
        monkeypatch.setenv(name, value)
    if not hasattr(configprovider, "ConfiguredEndpointProvider"):  # the oldest boto3 does not know that variable
        client = f"functools.partial(boto3.client, endpoint_url={server.url!r})"
        (tmp_path / "sitecustomize.py").write_text(f"import functools, boto3\nboto3.client = {client}\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = []
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(60)

    def start(*arguments, program=PROGRAM, **options):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        # With a process group of its own, as a shell gives it.
        started.append(subprocess.Popen([*program, *arguments], start_new_session=True, **pipes, **options))
        return started[-1]

    yield start
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    clean = until(lambda: None not in [process.poll() for process in started] and not processes(others), 2)
    for pid in processes(others):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in started:
        process.kill()
        process.communicate()
    assert clean


def too_long(_number, _frame):
    raise TimeoutError


def processes(locks):
    """The ids of the processes which the program started for this table, as far as the system tells."""
    found, mark = [], f"SIMPLELOCK_TABLE={locks.name}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def end(process, stdin=b""):
    """Wait for the end of the program, and tell how it ended."""
    out, err = process.communicate(stdin)
    return Ended(process.returncode, out, err.decode())


def thief(others, direct):
    """Take the lock by force, as one who deletes the item; return whose it is now."""
    direct.delete_item(TableName=others.name, Key={"LockID": {"S": "a"}})
    return others.acquire("a", owner="thief").owner


@pytest.mark.rig
def test_command_has_its_own_input_output_arguments_and_status(start, others, server):
    """All bytes go through as they are, the end of the input too, and `--` in its arguments is its own."""
    sent = bytes(range(256)) * 1000
    script = 'cat; printf "%s|" "$@" >&2; exit 3'
    assert end(start("run", "a", "--", "sh", "-c", script, "x", "--", "--ttl", "-h"), sent) == (3, sent, "--|--ttl|-h|")
    assert others.holder("a") is None
    assert server.verbs == {"UpdateItem": 1, "DeleteItem": 1}


@pytest.mark.rig
def test_command_is_told_whose_lock_it_runs_under(start, others):
    """Key, whole owner and fencing token, while the table says the same."""
    script = 'echo "$SIMPLELOCK_KEY $SIMPLELOCK_OWNER $SIMPLELOCK_FENCING_TOKEN"; read line'
    command = ("run", "--fencing", "--data", "note", "a", "--", "sh", "-c", script)
    process = start(*command, program=[sys.executable, "-m", "simplelock"], cwd=ROOT)
    told = process.stdout.readline().decode().split()
    holder = others.holder("a")
    assert told == ["a", holder.owner, str(holder.fencing_token)]
    assert holder.data == "note"
    assert end(process, b"\n") == (0, b"", "")
    assert others.holder("a") is None


@pytest.mark.rig
def test_status_tells_by_which_signal_the_command_was_killed(start, others):
    """128 and its number, as a shell has it."""
    assert end(start("run", "a", "--", "sh", "-c", "kill -KILL $$")) == (128 + 9, b"", "")
    assert others.holder("a") is None


@pytest.mark.rig
def test_command_that_does_not_exist_leaves_nothing_locked(start, others):
    """Status 127, and a line that names it."""
    status, out, err = end(start("run", "a", "--", "./no-such-command"))
    assert (status, out) == (127, b"")
    assert line("no-such-command").fullmatch(err)
    assert others.holder("a") is None


@pytest.mark.rig
def test_lock_that_is_held_is_status_75(start, others, ran):
    """A line says by whom and for how long; the command does not run, and the holder stays."""
    lease = others.acquire("a", owner="web1", data="build 4711")
    status, out, err = end(start("run", "a", "--", "touch", str(ran)))
    assert (status, out) == (75, b"")
    assert line(rf"'a' is held by {lease.owner} \(build 4711\), \d+ s to its expiry").fullmatch(err)
    assert not ran.exists()
    assert others.holder("a").owner == lease.owner


@pytest.mark.rig
def test_wrong_usage_is_status_2(start, server):
    """Nothing is sent."""
    status, out, err = end(start("run", "--ttl", "0", "a", "--", "true"))
    assert (status, out) == (2, b"")
    assert re.fullmatch(r"usage: [^\n]*\n( +[^\n]*\n)*simplelock: error: ttl [^\n]*\n", err)
    assert server.verbs == {}


@pytest.mark.rig
def test_table_that_cannot_be_used_is_status_69(start, others, server, ran):
    """Missing, or not permitted: one line that names the remedy, and the command does not run."""
    missing = end(start("run", "--table", "Elsewhere", "a", "--", "touch", str(ran)))
    server.fault("UpdateItem", "reject", code="AccessDeniedException")
    denied = end(start("run", "a", "--", "touch", str(ran)))
    assert (missing.status, denied.status) == (69, 69)
    assert line(r"'Elsewhere'.*Region.*create-table").fullmatch(missing.err)
    assert line("AccessDeniedException.*permissions").fullmatch(denied.err)
    assert not ran.exists()
    assert others.holder("a") is None


@pytest.mark.rig
def test_nobody_holds_it_is_status_1(start):
    """The way that scripts ask."""
    assert end(start("show", "a")) == (1, b"'a' is held by nobody\n", "")


@pytest.mark.rig
def test_signals_reach_the_command_once(start, others):
    """From a terminal, for the whole group, or from a service manager; the lock is given back when it has ended."""
    script = """
        exec 2>/dev/null
        trap "echo caught; caught=1" INT TERM
        echo on
        until [ $caught ]; do sleep 0.05; done
        echo off
        read line
        exit 7
    """
    running = [start("run", name, "--", "sh", "-c", script) for name in ("SIGINT", "SIGTERM")]
    assert [process.stdout.readline() for process in running] == [b"on\n"] * 2
    os.killpg(running[0].pid, signal.SIGINT)
    running[1].terminate()
    assert [process.stdout.read(11) for process in running] == [b"caught\noff\n"] * 2
    assert {holder.key for holder in others.holders()} == {"SIGINT", "SIGTERM"}
    assert [end(process, b"\n") for process in running] == [(7, b"", "")] * 2
    assert list(others.holders()) == []


@pytest.mark.rig
def test_signal_from_the_commands_first_moment_is_passed_on(start, others):
    """It is neither lost nor the end of the program alone, however early it comes."""
    script = 'exec 2>/dev/null; trap "echo caught; exit 7" TERM; kill -TERM $PPID; while :; do sleep 0.05; done'
    assert end(start("run", "a", "--", "sh", "-c", script)) == (7, b"caught\n", "")
    assert others.holder("a") is None


@pytest.mark.rig
def test_signal_while_waiting_leaves_nothing(start, others, server, ran):
    """The lock is its holder's, and the command never runs."""
    lease = others.acquire("a")
    process = start("run", "--wait", "inf", "a", "--", "touch", str(ran))
    assert until(lambda: server.verbs["GetItem"])  # between two tries
    os.killpg(process.pid, signal.SIGINT)
    assert end(process) == (128 + 2, b"", "")
    assert lease.release()
    assert others.holder("a") is None
    assert not ran.exists()


@pytest.mark.rig
def test_command_is_ended_when_its_lock_is_lost(start, others, direct):
    """SIGTERM, once, to all its processes, and SIGKILL to those that are left: status 70, whatever it says."""
    stubborn = '(trap "" TERM; echo stubborn; exec sleep 60) &'
    script = f'trap "echo caught; exit 0" TERM; {stubborn} sleep 60 & wait'
    process = start("run", "--ttl", "2", "a", "--", "sh", "-c", script)
    assert process.stdout.readline() == b"stubborn\n"
    owner = thief(others, direct)
    status, out, err = end(process)
    assert (status, out) == (70, b"caught\n")
    assert line(f"{owner} has taken it").fullmatch(err)
    assert others.holder("a").owner == owner


@LINUX
@pytest.mark.rig
def test_command_of_a_killed_program_ends_too(start, others):
    """Nobody renews its lease: it may not go on. Until that has run out, nobody else begins."""
    process = start("run", "a", "--", "sh", "-c", "echo $$; exec sleep 60")
    command = int(process.stdout.readline())
    assert command in processes(others)
    process.kill()
    process.wait()
    assert until(lambda: processes(others) == [])
    assert others.holder("a").expires_in > 0


@pytest.mark.rig
def test_command_that_ignores_sigterm_is_killed(start, others, direct):
    """5 seconds after SIGTERM, its child too."""
    script = 'trap "" TERM; sleep 60 & echo $$ $!; wait'
    process = start("run", "--ttl", "2", "a", "--", "sh", "-c", script)
    ids = [int(word) for word in process.stdout.readline().split()]
    assert until(lambda: set(ids) < set(processes(others)))  # a fork shows up when it has become `sleep`
    began, owner = time.monotonic(), thief(others, direct)
    status, out, err = end(process)
    took = time.monotonic() - began
    print(f"killed after {took:.1f} s")
    assert (status, out) == (70, b"")
    assert line(f"{owner} has taken it").fullmatch(err)
    assert 5 <= took < 7
    assert until(lambda: processes(others) == [])


@LINUX
@pytest.mark.rig
@pytest.mark.parametrize("ttl", [1, 2])
def test_waiting_program_displaces_a_killed_one(start, others, server, ttl):
    """Within ttl and 3 seconds, and not while the killed one's command runs."""
    first = start("run", "--ttl", str(ttl), "a", "--", "sleep", "60")
    assert until(lambda: server.verbs["UpdateItem"] >= 2)  # it has been renewed
    second = start("run", "--wait", "30", "a", "--", "echo", "begins")
    assert until(lambda: server.verbs["GetItem"] >= 2)
    began = time.monotonic()
    first.kill()
    assert second.stdout.readline() == b"begins\n"
    took = time.monotonic() - began
    print(f"ttl {ttl} s: displaced after {took:.2f} s")
    assert took <= ttl + 3
    assert end(second) == (0, b"", "")
    assert others.holder("a") is None
