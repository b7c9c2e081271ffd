"""The rig's own tools do what they say, on every engine."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from . import engines
from .proxy import ANY, EVERY, FAULTS, Proxy

KEY = {"LockID": {"S": "name"}}
CONTEND_SECONDS = 4
OWNER = """
import engines, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
with engines.running(sys.argv[1]) as engine:
    print(engine.port, flush=True)
    signal.pause()
"""


def count_up(client: Any, table: str) -> Any:
    """Add one to the item's counter, so that the number of applied sends can be read."""
    return client.update_item(
        TableName=table,
        Key=KEY,
        UpdateExpression="ADD Applied :one",
        ExpressionAttributeValues={":one": {"N": "1"}},
        ReturnConsumedCapacity="TOTAL",
    )


def read(client: Any, table: str) -> Any:
    """Read the item."""
    return client.get_item(TableName=table, Key=KEY, ConsistentRead=True, ReturnConsumedCapacity="TOTAL")


def applied(client: Any, table: str) -> int:
    """How often the counter was raised."""
    return int(read(client, table).get("Item", {}).get("Applied", {}).get("N", "0"))


def outcome(call: Callable[[], Any]) -> tuple[str, int | None]:
    """What a caller sees: the error's name, or how much of the reply there is; and the retries."""
    try:
        reply = call()
    except ClientError as error:
        reply = error.response
        return reply["Error"]["Code"], reply["ResponseMetadata"]["RetryAttempts"]
    except BotoCoreError as error:  # these do not say how often they were retried
        return type(error).__name__, None
    whole = "ConsumedCapacity" in reply
    return "whole" if whole else "bare", reply["ResponseMetadata"]["RetryAttempts"]


def eventually(condition: Callable[[], bool], timeout: float = 5) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def refused(port: int, host: str = "127.0.0.1") -> bool:
    """Whether nobody listens."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return False
    return True


def ending(port: int, table: str) -> str | float:
    """How a reply ends on the wire: by what, or with which share of the announced body."""
    fields = {**engines.PING, "X-Amz-Target": "DynamoDB_20120810.UpdateItem", "Connection": "close"}
    body = json.dumps({"TableName": table, "Key": KEY})
    lines = [f"{name}: {value}" for name, value in fields.items()]
    head = ["POST / HTTP/1.1", f"Host: 127.0.0.1:{port}", *lines, f"Content-Length: {len(body)}"]
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall("\r\n".join([*head, "", body]).encode())
        try:
            data = b"".join(iter(lambda: connection.recv(65536), b""))
        except ConnectionResetError:
            return "reset"
    head, _, body = data.partition(b"\r\n\r\n")
    announced = re.findall(rb"(?i)content-length: (\d+)", head)
    if not announced:
        return "closed"
    length = int(announced[0])
    return round(len(body) / length, 1) if length else "nothing announced"


def contend(url: str, table: str) -> tuple[list[int], int]:
    """Write round after round from 8 threads, conditionally: the rounds won, and the refusals."""
    client = engines.make_client(SimpleNamespace(url=url))
    count_up(client, table)
    eventually(lambda: applied(client, table) == 2, timeout=60)  # the other process is there too
    until = time.monotonic() + CONTEND_SECONDS

    def contender(_: int) -> tuple[list[int], int]:
        won, refusals, last = [], 0, 0
        while time.monotonic() < until:
            try:
                client.update_item(
                    TableName=table,
                    Key=KEY,
                    UpdateExpression="SET Round = :next",
                    ConditionExpression="Round = :last",
                    ExpressionAttributeValues={
                        ":last": {"N": str(last)},
                        ":next": {"N": str(last + 1)},
                    },
                )
            except client.exceptions.ConditionalCheckFailedException:
                refusals += 1
                last = int(read(client, table)["Item"]["Round"]["N"])
            else:
                last += 1
                won.append(last)
        return won, refusals

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(contender, range(8)))
    return [n for won, _ in results for n in won], sum(refusals for _, refusals in results)


# Engines


def test_engine_listens_on_loopback_only(engine: engines.Engine) -> None:
    """An engine is reached at 127.0.0.1 and at no other address."""
    assert not refused(engine.port)
    assert refused(engine.port, host="127.0.0.2")


def test_engine_ends_with_its_block(engine: engines.Engine) -> None:
    """A test that fails leaves no engine behind."""
    with contextlib.suppress(ZeroDivisionError), engines.running(engine.name) as other:
        assert not refused(other.port)
        raise ZeroDivisionError
    assert refused(other.port)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_engine_ends_with_its_owner(engine: engines.Engine, end: signal.Signals, tmp_path: Path) -> None:
    """Neither an interrupted nor a killed test run leaves an engine behind."""
    if end == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux ties a process to its parent")
    with subprocess.Popen(
        engines.leashed([sys.executable, "-c", OWNER, engine.name]),
        cwd=engines.HERE.parent,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed owner leaves its scratch folder
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as owner:
        port = int(owner.stdout.readline())
        assert not refused(port)
        owner.send_signal(end)
    assert eventually(functools.partial(refused, port))
    assert end == signal.SIGKILL or not any(tmp_path.iterdir())


def test_engine_that_is_missing_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine that is not installed is refused with the command that installs it."""
    monkeypatch.setattr(engines, "HOME", tmp_path)
    for name in engines.PACKAGES:
        with (
            pytest.raises(engines.NotInstalled, match=rf"engines\.py install {name}$"),
            engines.running(name),
        ):
            pass


def test_refusal_carries_date_and_item(engine: engines.Engine, make_client: Any, table: str) -> None:
    """A refused write says when it is, and all but dynalite say what stood in its way."""
    client = make_client(engine)
    count_up(client, table)
    with pytest.raises(client.exceptions.ConditionalCheckFailedException) as caught:
        client.delete_item(
            TableName=table,
            Key=KEY,
            ConditionExpression="attribute_not_exists(LockID)",
            ReturnValuesOnConditionCheckFailure="ALL_OLD",
        )
    assert "date" in caught.value.response["ResponseMetadata"]["HTTPHeaders"]
    item = {**KEY, "Applied": {"N": "1"}} if engine.returns_refused_item else None
    assert caught.value.response.get("Item") == item


def test_intact_replies_carry_consumed_capacity(engine: engines.Engine, make_client: Any, table: str) -> None:
    """A whole reply has ConsumedCapacity when asked for, also when there is nothing to report."""
    client = make_client(engine)
    nothing = read(client, table)
    assert "Item" not in nothing
    asked = {"TableName": table, "ReturnConsumedCapacity": "TOTAL"}
    replies = [
        nothing,
        client.scan(**asked),
        client.delete_item(**asked, Key=KEY),
        count_up(client, table),
        read(client, table),
        client.scan(**asked),
    ]
    assert ["CapacityUnits" in reply.get("ConsumedCapacity", {}) for reply in replies] == [True] * 6


def test_conditional_writes_have_one_winner_a_round(engine: engines.Engine, make_client: Any, table: str) -> None:
    """Of 16 threads in 2 processes that write the same next round, exactly one is told it did."""
    make_client(engine).put_item(TableName=table, Item={**KEY, "Round": {"N": "0"}})
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.starmap(contend, [(engine.url, table)] * 2, chunksize=1)
    won = sorted(n for rounds, _ in results for n in rounds)
    assert won == list(range(1, len(won) + 1))
    assert all(rounds and refusals for rounds, refusals in results)
    print(f"{engine.name}: {len(won)} rounds, {sum(r for _, r in results)} refusals")


def test_stopped_engine_applies_what_its_client_gave_up(engine: engines.Engine, make_client: Any, table: str) -> None:
    """A write that timed out against a stopped engine is there once the engine goes on."""
    impatient = make_client(engine, read_timeout=0.5, retries={"total_max_attempts": 1})
    read(impatient, table)
    engine.process.send_signal(signal.SIGSTOP)
    try:
        assert outcome(lambda: count_up(impatient, table))[0] == "ReadTimeoutError"
    finally:
        engine.process.send_signal(signal.SIGCONT)
    assert eventually(lambda: applied(make_client(engine), table) == 1)


@pytest.mark.parametrize("sort_key", [None, "Kind"])
def test_make_table_makes_keys_and_ttl(
    engine: engines.Engine, make_client: Any, request: pytest.FixtureRequest, sort_key: str | None
) -> None:
    """A table has the keys that were asked for, and TTL on ExpiresAt where the engine has TTL."""
    client, name = make_client(engine), f"Made-{sort_key}"
    engines.make_table(client, name, sort_key)
    schema = client.describe_table(TableName=name)["Table"]["KeySchema"]
    assert [key["AttributeName"] for key in schema] == ["LockID", *filter(None, [sort_key])]
    if engine.has_ttl:
        found = client.describe_time_to_live(TableName=name)["TimeToLiveDescription"]
        assert found["AttributeName"] == "ExpiresAt"
        assert found["TimeToLiveStatus"] in {"ENABLING", "ENABLED"}


# The proxy

# fault, options, which sends it meets, what the caller sees, how many sends were made and applied
MATRIX = [
    ("drop_reply", {}, 1, "whole", 2, 2),
    ("drop_reply", {}, EVERY, "ConnectionClosedError", 3, 3),
    ("reset_reply", {}, 1, "whole", 2, 2),
    ("reset_reply", {}, EVERY, "ConnectionClosedError", 3, 3),
    ("fail_reply", {}, 1, "whole", 2, 2),
    ("fail_reply", {}, EVERY, "InternalServerError", 3, 3),
    ("cut_reply", {}, 1, "whole", 2, 2),
    ("cut_reply", {}, EVERY, "bare", 3, 3),
    ("cut_reply", {"share": 0}, EVERY, "bare", 3, 3),
    ("cut_reply", {"checksum": False}, 1, "bare", 1, 1),
    ("empty_reply", {}, 1, "whole", 2, 2),
    ("empty_reply", {}, EVERY, "bare", 3, 3),
    ("empty_reply", {"checksum": False}, 1, "bare", 1, 1),
    ("delay_reply", {"seconds": 0.1}, EVERY, "whole", 1, 1),
    ("delay_reply", {"seconds": 0.8}, 1, "whole", 2, 2),
    ("delay_reply", {"seconds": 0.8}, EVERY, "ReadTimeoutError", 3, 3),
    ("hold", {}, 1, "whole", 2, 1),
    ("hold", {}, EVERY, "ReadTimeoutError", 3, 0),
    ("throttle", {}, 1, "whole", 2, 1),
    ("throttle", {}, EVERY, "ProvisionedThroughputExceededException", 3, 0),
    ("throttle", {"code": "ThrottlingException"}, 1, "whole", 2, 1),
    ("reject", {"code": "AccessDeniedException"}, 1, "AccessDeniedException", 1, 0),
    ("reject", {"code": "InternalServerError", "status": 500}, 1, "whole", 2, 1),
    ("refuse", {}, 1, "whole", 2, 1),
    ("refuse", {}, EVERY, "ConnectionClosedError", 3, 0),
]


@pytest.mark.parametrize(
    ("fault", "options", "nth", "seen", "sends", "effect"),
    MATRIX,
    ids=[f"{row[0]}-{row[1] or ''}-{'first' if row[2] else 'every'}" for row in MATRIX],
)
def test_fault_is_what_its_name_says(
    engine: engines.Engine,
    make_client: Any,
    proxy: Proxy,
    table: str,
    fault: str,
    options: dict[str, Any],
    nth: int | None,
    seen: str,
    sends: int,
    effect: int,
) -> None:
    """A fault shows the caller its symptom, is retried as said and applies what it lets by."""
    rule = proxy.fault("UpdateItem", fault, nth=nth, **options)
    patience = 0.6 if fault in {"hold", "delay_reply"} else 3
    client = make_client(proxy, read_timeout=patience)
    got, retries = outcome(lambda: count_up(client, table))
    assert got == seen
    assert retries in {None, sends - 1}
    assert proxy.verbs["UpdateItem"] == sends
    assert rule.fired == proxy.faults[fault] == (1 if nth else sends)
    assert applied(make_client(engine), table) == effect


def test_matrix_has_every_fault() -> None:
    """No fault is without its row, and a misspelt one is an error and not a silent pass."""
    assert {row[0] for row in MATRIX} == set(FAULTS)
    with pytest.raises(ValueError, match="drop_reply"):
        Proxy(0).fault(ANY, "drop")


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("drop_reply", "closed"),
        ("reset_reply", "reset"),
        ("cut_reply", 0.5),
        ("empty_reply", "nothing announced"),
        ("refuse", "closed"),
    ],
)
def test_connection_ends_as_the_fault_says(proxy: Proxy, table: str, fault: str, seen: str | float) -> None:
    """On the wire a drop is a FIN, a reset is a RST, and a cut body falls short of its header."""
    proxy.fault("UpdateItem", fault)
    assert ending(proxy.port, table) == seen
    assert ending(proxy.port, table) == 1


def test_intact_requests_share_a_connection(make_client: Any, proxy: Proxy, table: str) -> None:
    """The proxy keeps connections alive, as DynamoDB does, and takes nothing from a reply."""
    client = make_client(proxy)
    assert [outcome(lambda: count_up(client, table)) for _ in range(5)] == [("whole", 0)] * 5
    assert proxy.connections == 1


def test_rule_counts_its_own_verb_from_when_it_was_made(make_client: Any, proxy: Proxy, table: str) -> None:
    """nth=2 is the second request of that verb, whatever else goes by; ANY counts all verbs."""
    client = make_client(proxy, retries={"total_max_attempts": 1})
    count_up(client, table)
    second = proxy.fault("UpdateItem", "refuse", nth=2)
    fourth = proxy.fault(ANY, "throttle", nth=4)
    calls = [count_up, read, count_up, read, count_up]
    seen = [outcome(functools.partial(call, client, table))[0] for call in calls]
    throttled = "ProvisionedThroughputExceededException"
    assert seen == ["whole", "whole", "ConnectionClosedError", throttled, "whole"]
    assert (second.fired, fourth.fired) == (1, 1)


def test_held_request_is_delivered_after_its_client_gave_up(
    engine: engines.Engine, make_client: Any, proxy: Proxy, table: str
) -> None:
    """A held request has no effect until it is delivered, long after the caller had its error."""
    direct, rule = make_client(engine), proxy.fault("UpdateItem", "hold")
    impatient = make_client(proxy, read_timeout=0.5, retries={"total_max_attempts": 1})
    assert outcome(lambda: count_up(impatient, table))[0] == "ReadTimeoutError"
    assert outcome(lambda: count_up(impatient, table)) == ("whole", 0)
    assert applied(direct, table) == 1
    assert rule.deliver() == [200]
    assert applied(direct, table) == 2


def test_held_request_is_answered_while_its_client_waits(make_client: Any, proxy: Proxy, table: str) -> None:
    """A client that still waits when its request is delivered gets the engine's reply."""
    rule = proxy.fault("UpdateItem", "hold")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(outcome, functools.partial(count_up, make_client(proxy), table))
        rule.wait()
        assert not call.done()
        assert rule.deliver() == [200]
        assert call.result() == ("whole", 0)
    with pytest.raises(TimeoutError):
        proxy.fault("UpdateItem", "hold").deliver(timeout=0.01)


def test_proxy_that_is_down_refuses_and_comes_back(make_client: Any, proxy: Proxy, table: str) -> None:
    """While it is down nothing listens, not even for an open connection; then all is as before."""
    client = make_client(proxy)
    read(client, table)
    with proxy.down():
        assert outcome(lambda: read(client, table))[0] == "EndpointConnectionError"
    assert outcome(lambda: read(client, table)) == ("whole", 0)
    assert proxy.verbs["GetItem"] == 2


def test_date_is_shifted_replaced_or_stripped(make_client: Any, proxy: Proxy, table: str) -> None:
    """Every reply, a made-up one too, says the time that the proxy was told to say."""
    client = make_client(proxy, retries={"total_max_attempts": 1})

    def date(*, broken: bool) -> str | None:
        if broken:
            proxy.fault(ANY, "throttle")
        try:
            reply = read(client, table)
        except ClientError as error:
            reply = error.response
        return reply["ResponseMetadata"]["HTTPHeaders"].get("date")

    for broken in (False, True):
        for shift in (0, 3600, -20.0):
            proxy.date = shift
            said = parsedate_to_datetime(date(broken=broken)).timestamp()
            assert -5 < said - shift - time.time() <= 0
        proxy.date = "yesterday"
        assert date(broken=broken) == "yesterday"
        proxy.date = None
        assert date(broken=broken) is None


def test_loss_is_seeded_and_drops_replies_only(
    engine: engines.Engine, make_client: Any, proxy: Proxy, table: str
) -> None:
    """The same seed loses the same replies, about the share asked for, and no request is lost."""
    client = make_client(proxy, retries={"total_max_attempts": 1})

    def losses(seed: int) -> list[bool]:
        proxy.lose(0.3, seed)
        return [outcome(lambda: count_up(client, table))[0] != "whole" for _ in range(40)]

    first = losses(1)
    assert losses(1) == first != losses(2)
    assert 4 < sum(first) < 20
    assert applied(make_client(engine), table) == 120


def test_heal_ends_faults_and_losses(make_client: Any, proxy: Proxy, table: str) -> None:
    """After heal, what broke every request breaks none."""
    client = make_client(proxy, retries={"total_max_attempts": 1})
    proxy.fault("UpdateItem", "refuse", nth=EVERY)
    proxy.lose(1, seed=1)
    for call in (count_up, read):
        assert outcome(functools.partial(call, client, table))[0] == "ConnectionClosedError"
    proxy.heal()
    for call in (count_up, read):
        assert outcome(functools.partial(call, client, table)) == ("whole", 0)


def test_requests_are_recorded(make_client: Any, proxy: Proxy, table: str) -> None:
    """The record says what was asked and when, whether it got through, and what either side saw."""
    client, began = make_client(proxy), time.monotonic()
    proxy.fault("UpdateItem", "refuse", nth=1)
    proxy.fault("UpdateItem", "fail_reply", nth=2)
    count_up(client, table)
    rows = [(r.verb, r.fault, r.forwarded, r.status, r.answer) for r in proxy.requests]
    assert rows == [
        ("UpdateItem", "refuse", False, None, None),
        ("UpdateItem", "fail_reply", True, 200, 500),
        ("UpdateItem", None, True, 200, 200),
    ]
    times = [began, *(request.time for request in proxy.requests), time.monotonic()]
    assert times == sorted(times)
    assert proxy.requests[0].params["Key"] == KEY
    proxy.forget()
    assert not proxy.requests
    assert not proxy.verbs
    assert not proxy.faults
