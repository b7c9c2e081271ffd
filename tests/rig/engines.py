"""Three independent DynamoDB engines, each a process of its own on 127.0.0.1.

    python tests/rig/engines.py install [ministack] [dynalite]

moto comes with the test extra. The other two are installed below $SIMPLELOCK_RIG_HOME (default:
simplelock-rig in the user's cache), so that what they pin never meets what the tests use.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import http.client
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("moto", "ministack", "dynalite")
PACKAGES = {"ministack": "ministack==1.5.33", "dynalite": "dynalite@4.0.0"}
HERE = Path(__file__).resolve()
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
HOME = Path(os.environ.get("SIMPLELOCK_RIG_HOME") or CACHE / "simplelock-rig").absolute()
REGION = "eu-west-1"  # tables belong to one, so all clients of an engine name the same
START_SECONDS = 30  # for a cold start on a busy machine; a warm one needs less than 1
PR_SET_PDEATHSIG = 1
# By itself dynalite ends when a client is killed while it sends: its handler of that error throws it.
SURVIVE = 'data:text/javascript,process.on("uncaughtException", (e) => { if (e.code !== "ECONNRESET") throw e })'
_making_client = threading.Lock()  # boto3's sessions are not thread-safe; its clients are

# Any key and any Region will do, but moto routes by this header and dynalite wants to see it.
PING = {
    "X-Amz-Target": "DynamoDB_20120810.ListTables",
    "X-Amz-Date": "20260101T000000Z",
    "Content-Type": "application/x-amz-json-1.0",
    "Authorization": "AWS4-HMAC-SHA256 Credential=rig/20260101/eu-west-1/dynamodb/aws4_request, "
    "SignedHeaders=host, Signature=0",
}


class NotInstalled(Exception):
    """The engine is not on this machine; the message says what installs it."""


@dataclass(frozen=True)
class Engine:
    """A running engine. Its `process` takes SIGSTOP and SIGCONT, which make it stall."""

    name: str
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """Where clients and proxies find it."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def returns_refused_item(self) -> bool:
        """Whether ReturnValuesOnConditionCheckFailure has an effect."""
        return self.name != "dynalite"

    @property
    def has_ttl(self) -> bool:
        """Whether it knows UpdateTimeToLive."""
        return self.name != "dynalite"


@contextlib.contextmanager
def running(name: str) -> Iterator[Engine]:
    """Run one engine for the length of the block; no process is left behind, whatever ends it.

    Raises:
        NotInstalled: It has to be installed first.
    """
    if name in PACKAGES and not _installed(name).exists():
        command = f"{Path(sys.executable).name} {os.path.relpath(HERE)} install {name}"
        raise NotInstalled(f"{name} is not installed: {command}")
    port = free_port()
    command, settings = _recipe(name, port)
    with tempfile.TemporaryDirectory(prefix="simplelock-rig-") as scratch:
        log = Path(scratch, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                leashed(command),
                cwd=scratch,
                env={**os.environ, **settings, "TMPDIR": scratch},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for pytest, whose fixtures then end this
            )
        try:
            _wait_until_ready(process, port, log)
            yield Engine(name, port, process)
        finally:
            process.kill()  # there is nothing to save, and a stopped process heeds nothing else
            process.wait()


def leashed(command: list[str]) -> list[str]:
    """Wrap a command so that the kernel kills it when the thread that starts it ends.

    This is for what no fixture can clean up: a test run that is itself killed. Only Linux can do
    it; elsewhere the command runs as it is.
    """
    return [sys.executable, "-I", str(HERE), "leash", str(os.getpid()), *command]


def free_port() -> int:
    """Pick a port that is free, below the range from which kernels hand out their own."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@functools.cache
def _session() -> Any:
    import boto3  # not at the top: the leash is to be quick

    return boto3.session.Session()


def make_client(target: Any, **settings: Any) -> Any:
    """Make a client for anything that has a `url`, with the limits of simplelock's own client."""
    from botocore.config import Config

    limits = {
        "connect_timeout": 2,
        "read_timeout": 3,
        "retries": {"mode": "standard", "total_max_attempts": 3},
        "max_pool_connections": 64,
    }
    with _making_client:
        return _session().client(
            "dynamodb",
            endpoint_url=target.url,
            region_name=REGION,
            aws_access_key_id="rig",
            aws_secret_access_key="rig",
            config=Config(**{**limits, **settings}),
        )


def make_table(client: Any, name: str, sort_key: str | None = None, *, ttl: bool = True) -> None:
    """Make a table for locks, by default with TTL where the engine has it."""
    keys = {"LockID": "HASH"} | ({sort_key: "RANGE"} if sort_key else {})
    client.create_table(
        TableName=name,
        BillingMode="PAY_PER_REQUEST",
        KeySchema=[{"AttributeName": key, "KeyType": kind} for key, kind in keys.items()],
        AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"} for key in keys],
    )
    patience = {"Delay": 0.02, "MaxAttempts": 500}
    client.get_waiter("table_exists").wait(TableName=name, WaiterConfig=patience)
    if not ttl:
        return
    try:
        client.update_time_to_live(
            TableName=name,
            TimeToLiveSpecification={"AttributeName": "ExpiresAt", "Enabled": True},
        )
    except client.exceptions.ClientError as error:
        if error.response["Error"]["Code"] != "UnknownOperationException":
            raise


def install(name: str) -> None:
    """Install one engine where `running` looks for it; nothing is done when it is there."""
    done, folder = _installed(name), str(_installed(name).parent)
    if done.exists():
        return
    if name == "ministack":
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        command = [f"{folder}/bin/python", "-m", "pip", "install", "-q"]
    else:
        command = ["npm", "install", "--prefix", folder, "--ignore-scripts", "--no-audit"]
    subprocess.run([*command, PACKAGES[name]], check=True)
    done.touch()  # last, so that an interrupted install is not taken for one


def _installed(name: str) -> Path:
    return HOME / PACKAGES[name] / "installed"  # a new version is a new folder


def _recipe(name: str, port: int) -> tuple[list[str], dict[str, str]]:
    """What runs an engine: its command, and its settings in the environment."""
    if name == "moto":
        return [sys.executable, str(HERE), "serve-moto", str(port)], {}
    folder = _installed(name).parent
    if name == "ministack":
        settings = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SERVICES": "dynamodb"}
        return [f"{folder}/bin/ministack"], settings | {"LOG_LEVEL": "WARNING"}
    command = ["node", "--import", SURVIVE, f"{folder}/node_modules/dynalite/cli.js", "--host", "127.0.0.1"]
    return [*command, "--port", str(port), "--createTableMs", "0", "--deleteTableMs", "0"], {}


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("POST", "/", b"{}", PING)
            if connection.getresponse().status == http.HTTPStatus.OK:
                return
        time.sleep(0.02)
    raise RuntimeError(f"the engine did not start:\n{log.read_text(errors='replace')[-2000:]}")


def tied_to(parent: int) -> bool:
    """Have the kernel kill this process when its parent ends; False if that has ended already."""
    with contextlib.suppress(AttributeError):  # no prctl: not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def _leash(owner: str, *command: str) -> None:
    """Become the command, tied to the life of the process that asked for it."""
    if tied_to(int(owner)):
        os.execvp(command[0], command)


def _serve_moto(port: str) -> None:
    """Serve moto with one request at a time: by itself it lets two writers win the same round."""
    import logging

    from moto.dynamodb.responses import DynamoHandler
    from moto.server import ThreadedMotoServer

    mutex, call_action = threading.Lock(), DynamoHandler.call_action

    def call_action_alone(handler: DynamoHandler) -> Any:
        with mutex:
            return call_action(handler)

    DynamoHandler.call_action = call_action_alone
    sys.setswitchinterval(1e-5)  # costs nothing here, and without the mutex a race would soon show
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for every request
    ThreadedMotoServer("127.0.0.1", int(port), verbose=False).start()
    threading.Event().wait()


def main(action: str, *arguments: str) -> None:
    """Run one of the actions of this file; `install` is the one for people."""
    if action == "install":
        for name in arguments or PACKAGES:
            install(name)
    else:
        {"leash": _leash, "serve-moto": _serve_moto}[action](*arguments)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["install"]))
