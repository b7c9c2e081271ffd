"""The README, held to its word: its examples run, its commands work, and the tests it names exist."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import boto3
import pytest
from moto.server import ThreadedMotoServer

import simplelock
from simplelock import LockTable

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NEEDS_NETWORK = "^python3 -m venv |^aws "  # to install, or an account
SET_UP = "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/python "
NONCE = "[0-9a-f]{16}"


class Block(NamedTuple):
    """A fenced block, and where it stands."""

    heading: str
    line: int
    text: str


def blocks(*languages):
    found, heading = [], ""
    for each in re.finditer(r"^#+ ([^\n]*)$|^```(\w*)\n(.*?)\n```$", README, re.MULTILINE | re.DOTALL):
        if each[3] is None:
            heading = each[1]
        elif each[2] in languages:
            found.append(Block(heading, README.count("\n", 0, each.start(3)), each[3]))
    return found


def by_heading(block):
    return block.heading


# What each example is to store, do and print, by the heading that it stands under.
EXAMPLES = {
    "simplelock": (["first", "second"], ""),
    "Try once": (["the report"], ""),
    "Wait for it": (["the report"], ""),
    "Hold it for longer": (["run with 2 threads more"], ""),
    "Many locks": (["account/1", "account/2"], ""),
    "Fencing": ([], ""),
    "Who holds it": (
        [],
        rf"web1/{NONCE} \(build 4711\), 62 s to its expiry\nnightly web1/{NONCE} 62\.0 build 4711\n",
    ),
    "Resume in another process": ([], "900 s to go\n"),
    "Break a stuck lock": ([], ""),
    "Leader election": (["lead"] * 3, ""),
    "asyncio": (["nightly"], ""),
    "The table": (["the report"], ""),
}


@pytest.fixture
def done():
    """What an example has done."""
    return []


@pytest.fixture
def namespace(clock, client, done):
    """What the examples take for granted: the tables, and somebody's work to do under the lock."""
    for name, options in {
        "Locks": {},
        "FencedLocks": {"fencing": True},
        "App": {"key_name": "PK", "sort_key": ("SK", "lock"), "expires_name": "TTL"},
    }.items():
        LockTable(name, client=client, **options).create(wait=False)
    threads = threading.active_count()

    class Job:
        def run(self):
            done.append(f"run with {threading.active_count() - threads} threads more")

        def cancel(self):
            done.append("cancelled")

    def transfer(leases):
        done.extend(lease.key for lease in leases if lease.held)

    def lead():
        clock.tick(25)  # while its heartbeat is late
        done.append("lead")

    async def work_on(lease):
        done.append(lease.key)

    names = {"LockTable": LockTable, "locks": LockTable("Locks", client=client, ttl=60)}
    names |= {"work": ["first", "second"], "store": done.append, "job": Job()}
    names |= {"transfer": transfer, "lead": lead, "work_on": work_on}
    yield names
    if hasattr(names["store"], "close"):
        names["store"].close()


def run(block, namespace):
    code = "\n" * block.line + block.text  # so that a traceback names the README's line
    exec(compile(code, "README.md", "exec"), namespace)  # noqa: S102


def items(client):
    tables = client.list_tables()["TableNames"]
    return [item for name in tables for item in client.scan(TableName=name)["Items"]]


@pytest.mark.parametrize("block", blocks("python"), ids=by_heading)
def test_example_does_what_is_said(block, namespace, client, done, capsys):
    """Every Python block runs, does its work under the lock, and gives the lock back."""
    expected, printed = EXAMPLES[block.heading]
    run(block, namespace)
    assert done == expected
    assert re.fullmatch(printed, capsys.readouterr().out)
    assert [item for item in items(client) if "OwnerID" in item] == []


@pytest.mark.parametrize("block", blocks("python"), ids=by_heading)
def test_example_compiles_alone(block):
    """No block needs the lines of another one, and each has its expectation here."""
    compile(block.text, "README.md", "exec")
    assert block.heading in EXAMPLES
    assert len([each for each in blocks("python") if each.heading == block.heading]) == 1


@pytest.mark.parametrize(
    ("heading", "printed"),
    [
        ("Try once", "another one is at it\n"),
        ("Wait for it", r"'nightly' is held by thief/1, 30 s to its expiry\n"),
    ],
)
def test_example_says_that_the_lock_is_held(heading, printed, namespace, steal, done, capsys):
    """While another holds the lock, nothing is stored, and the examples say so."""
    namespace["locks"].holder("nightly")
    steal("nightly")
    (block,) = (block for block in blocks("python") if block.heading == heading)
    run(block, namespace)
    assert done == []
    assert re.fullmatch(printed, capsys.readouterr().out)


def test_six_lines_are_enough():
    """The first thing after the sentence is an example of six lines."""
    first, *_ = blocks("python")
    assert len([line for line in first.text.splitlines() if line]) == 6
    assert re.match(r"# simplelock\n\n[^\n.]*\.\n\n```python\n", README)


def test_store_of_the_example_refuses_the_late_writer(namespace):
    """An older token is refused, the same and a newer one are not."""
    (block,) = (block for block in blocks("python") if block.heading == "Fencing")
    run(block, namespace)
    save, token = namespace["save"], namespace["lease"].fencing_token
    with pytest.raises(RuntimeError):
        save("2026", "late", token - 1)
    save("2026", "again", token)
    save("2026", "next", token + 1)
    assert namespace["store"].execute("SELECT * FROM report").fetchall() == [("2026", "next", token + 1)]


def test_stuck_lock_is_broken(namespace, steal, client):
    """Whoever holds it, it is free afterwards."""
    steal("nightly")
    (block,) = (block for block in blocks("python") if block.heading == "Break a stuck lock")
    run(block, namespace)
    assert items(client) == []


def test_lost_lock_of_the_example_stops_the_job(namespace, done, capsys):
    """What the example gives to `on_lost` can be called with a lease."""
    (block,) = (block for block in blocks("python") if block.heading == "Hold it for longer")
    run(block, namespace)
    namespace["stop"](namespace["lease"])
    assert done[1:] == ["cancelled"]
    assert capsys.readouterr().out == "training is lost\n"


def test_set_up_commands_stand_word_for_word():
    """Each is on a line of its own, where `.ci/run` and newcomers find it."""
    lines = README.splitlines()
    assert lines.count(f"{SET_UP}infra/demo.py") == 1
    assert lines.count(f"{SET_UP}-m pytest") == 1


@pytest.fixture(scope="module")
def endpoint():
    """An endpoint with DynamoDB, on loopback."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def shell(endpoint, tmp_path):
    """Run lines in a directory that has what they use; return the exit status and the output."""
    for name in ("simplelock.py", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "yourproject").mkdir()
    programs = {
        # The oldest boto3 does not know AWS_ENDPOINT_URL.
        "simplelock": f"#!{sys.executable}\nimport functools, boto3, simplelock\n"
        f"boto3.client = functools.partial(boto3.client, endpoint_url={endpoint!r})\n"
        "raise SystemExit(simplelock.main())\n",
        "backup.sh": '#!/bin/sh\necho "$SIMPLELOCK_KEY $*"\n',
    }
    for name, program in programs.items():
        path = tmp_path / name
        path.write_text(program, encoding="utf-8")
        path.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}

    def shell(lines):
        done = subprocess.run(
            ["sh", "-ec", lines],  # noqa: S607
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout

    return shell


@pytest.fixture
def stuck(endpoint):
    """A table with the lock that the README's commands look at, and break."""
    client = boto3.client("dynamodb", endpoint_url=endpoint)
    LockTable("Locks", client=client).create(wait=False)
    words = shlex.split(re.search("^simplelock release (.*)$", README, re.MULTILINE)[1])
    key, owner = words
    item = {"LockID": {"S": key}, "OwnerID": {"S": owner}, "ExpiresAt": {"N": "9999999999"}}
    client.put_item(TableName="Locks", Item=item)
    yield key, owner
    client.delete_table(TableName="Locks")


def shell_block(command):
    (block,) = (each for each in blocks("sh") if re.search(f"^{command}", each.text, re.MULTILINE))
    return block.text


def test_shell_blocks_are_run_here_or_need_a_network():
    """No block is left out but those that install or deploy."""
    left = [each for each in blocks("sh") if not re.search(NEEDS_NETWORK, each.text, re.MULTILINE)]
    run_here = ["simplelock run --wait", "simplelock list", "cp simplelock.py LICENSE"]
    assert [each.text for each in left] == [shell_block(command) for command in run_here]


@pytest.mark.rig
def test_commands_that_lock_work(shell):
    """The table is made, and the command runs under the lock, its output untouched."""
    assert shell(shell_block("simplelock run --wait")) == (0, "nightly --all\n")


@pytest.mark.rig
def test_commands_that_look_work(shell, stuck):
    """Who holds which lock is shown; the lock is broken; help and version are told."""
    key, owner = stuck
    status, printed = shell(shell_block("simplelock list"))
    assert status == 0, printed
    lines = printed.splitlines()
    assert lines[0].startswith(f"{key}: {owner}, ")
    shown = json.loads(lines[1])
    assert (shown["key"], shown["owner"]) == (key, owner)
    assert lines[2] == "released"
    assert "--conflict-exit-code" in printed
    assert lines[-1] == f"simplelock {simplelock.__version__}"


@pytest.mark.rig
def test_vendored_file_is_a_program(shell):
    """The file that was copied runs by itself."""
    version = f"{shlex.quote(sys.executable)} yourproject/simplelock.py --version"
    status, printed = shell(f"{shell_block('cp simplelock.py LICENSE')}\nunset PYTHONPATH\n{version}")
    assert (status, printed) == (0, f"simplelock {simplelock.__version__}\n")


def commands_elsewhere():
    """The commands in the configuration of cron, systemd and Kubernetes."""
    texts = [block.text for block in blocks("crontab", "ini")]
    commands = [re.search(r"simplelock run [^\n]* -- \S+", text)[0] for text in texts]
    (text,) = (block.text for block in blocks("yaml"))
    parts = re.findall(r"(?:command|args): (\[.*\])", text)
    return [*commands, shlex.join(word for part in parts for word in json.loads(part))]


@pytest.mark.parametrize("command", commands_elsewhere())
def test_command_of_other_programs_is_understood(command, monkeypatch):
    """What cron, systemd and Kubernetes are given has a key, a program, and options that exist."""
    seen = []
    monkeypatch.setattr(simplelock, "_run", lambda _locks, args: seen.append(args) or 0)
    assert simplelock.main(shlex.split(command)[1:]) == 0
    (understood,) = seen
    assert understood.key in ("nightly", "worker")
    assert understood.command[0].startswith("/usr/local/bin/")


def test_tests_that_are_named_exist():
    """A promise names the tests that prove it, and they are there."""
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", README)
    assert len(named) == README.count("::test_") >= 7
    for path, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_every_promise_names_a_test():
    """Each row of the table of promises has one at least."""
    table = README.partition("\n## What is promised\n")[2].partition("\nThe small print")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 7
    assert [row for row in rows if "::test_" not in row] == []


def test_files_and_sections_that_are_named_exist():
    """No path and no link of the README leads nowhere."""
    paths = set(re.findall(r"`((?:infra|tests)/[\w./]+)[`:]", README))
    paths |= set(re.findall(r"\]\((\w[\w./]*)\)", README))
    assert [path for path in paths if not (ROOT / path).exists()] == []
    headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}
    assert set(re.findall(r"\]\(#([\w-]+)\)", README)) <= anchors


def test_other_ways_to_make_the_table_have_the_modules_names():
    """Terraform's and CDK's tables have the key and the TTL attribute of a default LockTable."""
    for block in blocks("hcl", "ts"):
        assert set(re.findall(r'"(LockID|ExpiresAt)"', block.text)) == {"LockID", "ExpiresAt"}
        assert "PAY_PER_REQUEST" in block.text


def test_parameters_of_the_deploy_commands_exist():
    """What `aws cloudformation deploy` is told to override is a parameter of that template."""
    deployments = [block.text for block in blocks("sh") if "--parameter-overrides" in block.text]
    assert len(deployments) == 2
    for text in deployments:
        template = (ROOT / re.search(r"infra/[\w/]+\.yaml", text)[0]).read_text(encoding="utf-8")
        for each in text.partition("--parameter-overrides ")[2].split():
            assert f"\n  {each.partition('=')[0]}:\n    Type: String\n" in template


def test_policy_is_the_templates():
    """Same actions, same condition; the prefix and the table are examples."""
    (block,) = blocks("json")
    policy = json.loads(block.text)
    template = (ROOT / "infra" / "table.yaml").read_text(encoding="utf-8")
    actions = f"Action: [{', '.join(policy['Action'])}]\n"
    prefix = {"dynamodb:LeadingKeys": ["reports/*"]}
    assert template.count(actions) == 2  # with a key of one's own and without
    assert policy["Condition"] == {
        "ForAllValues:StringLike": prefix,
        "Null": {"dynamodb:LeadingKeys": "false"},
    }


def test_version_is_the_same_everywhere():
    """The module, the package and the newest entry of the changelog agree."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[?(\d[\w.]*)", changes, re.MULTILINE)[1]
    assert simplelock.__version__ == setup["metadata"]["version"] == newest


def test_limits_name_global_tables():
    """Field case 38: that both Regions of a global table can win is said where the limits are."""
    limits = README.split("\n## Limits\n")[1].split("\n## ")[0]
    assert "In a global table both sides can win" in limits
