"""The Lambda function of infra/guard_s3: its handler on moto, and its template."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import functools
import importlib.util
import io
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import types
import zipfile

import boto3
import faults
import pytest
import requests
import templates
import yaml
from botocore.exceptions import ClientError
from moto import mock_aws

import simplelock

FOLDER = templates.INFRA / "guard_s3"
BUCKET = "my-data"
BUCKET_ARN = f"arn:aws:s3:::{BUCKET}"
SUMMARY = "summaries/data.json"
LOCK = f"s3://{BUCKET}/{SUMMARY}"
LEFT = 8.0  # seconds that a function has left unless a test says otherwise
SENT = ["GetItem", "UpdateItem", "HeadObject", "GetObject", "PutObject", "UpdateItem"]


TEMPLATE = templates.load("guard_s3/template.yaml")
RESOURCES = TEMPLATE["Resources"]


def properties(resource):
    return RESOURCES[resource]["Properties"]


# What S3 says of an object, and SQS of a message, but for what they are about.
RECORD = json.loads("""{
    "eventVersion": "2.1", "eventSource": "aws:s3", "awsRegion": "eu-west-1",
    "eventTime": "2026-01-01T00:00:00.123Z", "userIdentity": {"principalId": "AWS:AROAX:up"},
    "requestParameters": {"sourceIPAddress": "192.0.2.7"},
    "responseElements": {"x-amz-request-id": "5N0WQHX", "x-amz-id-2": "a1b2"}
}""")
MESSAGE = json.loads("""{
    "messageId": "5f1c2f7e-0000-4000-8000-000000000000", "receiptHandle": "AQEBx",
    "attributes": {"ApproximateReceiveCount": "1", "SentTimestamp": "1767225600123"},
    "messageAttributes": {}, "md5OfBody": "00000000000000000000000000000000",
    "eventSource": "aws:sqs", "eventSourceARN": "arn:aws:sqs:eu-west-1:123456789012:q",
    "awsRegion": "eu-west-1"
}""")


def s3_event(*keys, name="ObjectCreated:Put"):
    """What S3 sends about objects; the keys are as S3 encodes them."""
    bucket = {"name": BUCKET, "ownerIdentity": {"principalId": "A3X"}, "arn": BUCKET_ARN}
    place = {"s3SchemaVersion": "1.0", "configurationId": "0c2b7a4e", "bucket": bucket}
    told = {"sequencer": "00677489D9C5A1B3E2"}
    if "Created" in name:  # only then are these told; and they are out of date
        told |= {"size": 999, "eTag": "0" * 32}
    about = [place | {"object": {"key": key} | told} for key in keys]
    return {"Records": [RECORD | {"eventName": name, "s3": each} for each in about]}


def messages(*bodies):
    """What SQS invokes the function with."""
    return {"Records": [MESSAGE | {"body": json.dumps(body)} for body in bodies]}


def context(left):
    return types.SimpleNamespace(get_remaining_time_in_millis=lambda: int(left * 1000))


def deliver(function, *keys, left=LEFT, **details):
    """Deliver an S3 event by a message of its own."""
    function.handle(messages(s3_event(*keys, **details)), context(left))


def load():
    """Load the handler as a fresh execution environment does, with clients of its own."""
    spec = importlib.util.spec_from_file_location("handler", FOLDER / "handler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def watch(function, hook):
    """Call the hook before each request of the function, with operation and request."""

    def call(event_name, request, **_):
        return hook(event_name.rpartition(".")[2], request)

    for client in (function.s3, function.locks.client):
        client.meta.events.register_first("before-send", call)


def noted(function):
    """The operations that the function has sent, one by one, retries included."""
    operations = []
    watch(function, lambda operation, _: operations.append(operation))
    return operations


def at_write(function, look):
    """What `look` returned whenever the function was about to write a summary."""
    seen = []
    watch(function, lambda name, request: seen.append(look(request)) if name == "PutObject" else None)
    return seen


@functools.cache
def session():
    return boto3.Session()  # one for all: it takes ten times as long to make as a client


@pytest.fixture
def s3(locks, monkeypatch):
    """A client of an in-process S3 with the bucket, beside a DynamoDB with the table."""
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", session())
    monkeypatch.setenv("LOCK_TABLE", locks.name)
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": s3.meta.region_name})
    return s3


@pytest.fixture
def put(s3):
    """Put an object of a size."""
    return lambda key, size: s3.put_object(Bucket=BUCKET, Key=key, Body=b"x" * size)


@pytest.fixture
def function(s3):
    """The handler, loaded where its bucket and its table are."""
    return load()


@pytest.fixture
def summary(s3):
    """Read a summary; None where there is none."""

    def read(key=SUMMARY):
        with contextlib.suppress(s3.exceptions.NoSuchKey):
            return json.load(s3.get_object(Bucket=BUCKET, Key=key)["Body"])

    return read


@pytest.fixture
def others(client):
    """The locks as another program takes them."""
    return simplelock.LockTable("Locks", client=client, fencing=True)


# What it makes of events


@pytest.mark.parametrize(
    ("encoded", "key"),
    [
        ("data/this+im+%2B+age.txt", "data/this im + age.txt"),
        ("data/50%2525.txt", "data/50%25.txt"),  # decoded twice, it would be 50%.txt
        ("data/%E5%AD%97.txt", "data/字.txt"),
    ],
)
def test_key_is_decoded_exactly_once(function, put, summary, encoded, key):
    """Field case 3: an event's URL-encoded key is the object's own after one decoding."""
    put(key, 5)
    deliver(function, encoded)
    assert summary()["objects"] == {key: 5}


def test_several_records_make_one_write_for_each_summary(function, put, summary, others):
    """Records of all messages are put together by folder, each under the lock of its summary."""
    for size, key in enumerate(["data/a", "data/b", "data/c", "data/x/d"], start=1):
        put(key, size)
    held = at_write(function, lambda _: [holder.key for holder in others.holders()])
    function.handle(
        messages(s3_event("data/a", "data/x/d"), s3_event("data/b"), s3_event("data/c")),
        context(LEFT),
    )
    assert summary()["objects"] == {"data/a": 1, "data/b": 2, "data/c": 3}
    assert summary()["bytes"] == 6
    assert summary("summaries/data/x.json")["objects"] == {"data/x/d": 4}
    assert held == [[LOCK], [f"s3://{BUCKET}/summaries/data/x.json"]]


def test_test_event_is_passed_over(function):
    """The event that S3 sends when a notification is set has no records: nothing is sent."""
    sent = noted(function)
    body = {"Service": "Amazon S3", "Event": "s3:TestEvent", "Time": "2026-01-01T00:00:00.000Z"}
    body |= {"Bucket": BUCKET, "RequestId": "5N0WQHEXAMPLE", "HostId": "a1b2"}
    function.handle(messages(body), context(LEFT))
    assert sent == []


@pytest.mark.parametrize(
    "name",
    ["ObjectRemoved:Delete", "ObjectRemoved:DeleteMarkerCreated", "LifecycleExpiration:Delete"],
)
def test_deleted_object_leaves_the_summary(function, s3, put, summary, name):
    """An object that is gone is taken out, the others stay."""
    put("data/a", 1)
    put("data/b", 2)
    deliver(function, "data/a", "data/b")
    s3.delete_object(Bucket=BUCKET, Key="data/a")
    deliver(function, "data/a", name=name)
    assert summary()["objects"] == {"data/b": 2}
    assert summary()["bytes"] == 2


def test_delete_of_an_old_version_does_not_take_the_object_out(function, s3, put, summary):
    """Where versions are kept, a delete event may concern another version than the newest."""
    s3.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    old = put("data/a", 1)["VersionId"]
    put("data/a", 2)
    s3.delete_object(Bucket=BUCKET, Key="data/a", VersionId=old)
    deliver(function, "data/a", name="ObjectRemoved:Delete")
    assert summary()["objects"] == {"data/a": 2}


@pytest.mark.parametrize(
    ("story", "objects"),
    [
        ("put1 created created", {"data/a": 1}),
        ("put1 put2 created created", {"data/a": 2}),
        ("put1 created put2 created created", {"data/a": 2}),
        ("put1 delete removed created", {}),
        ("put1 created delete removed created removed", {}),
        ("put1 delete put2 created removed", {"data/a": 2}),
    ],
)
def test_events_late_or_twice_do_no_harm(function, s3, put, summary, story, objects):
    """Whatever the order and number of the events, the summary says what is there."""
    steps = {
        "put1": lambda: put("data/a", 1),
        "put2": lambda: put("data/a", 2),
        "delete": lambda: s3.delete_object(Bucket=BUCKET, Key="data/a"),
        "created": lambda: deliver(function, "data/a"),
        "removed": lambda: deliver(function, "data/a", name="ObjectRemoved:Delete"),
    }
    for step in story.split():
        steps[step]()
    assert summary()["objects"] == objects


# When it does not start


@pytest.mark.parametrize("left", [0, 2.9])
def test_too_little_time_left_is_refused(function, put, left):
    """Field case 27: with 0 ms left, or too few, it raises before it sends anything."""
    put("data/a", 1)
    sent = noted(function)
    with pytest.raises(TimeoutError, match=rf"{left:.1f} s are left.*'{SUMMARY}'"):
        deliver(function, "data/a", left=left)
    assert sent == []


def test_time_left_is_asked_for_each_summary(function, put, summary):
    """What the first summary has used up, the second does not count on."""
    put("data/a", 1)
    put("data/x/b", 2)
    left = iter([LEFT * 1000, 0])
    clock = types.SimpleNamespace(get_remaining_time_in_millis=lambda: next(left))
    with pytest.raises(TimeoutError, match=r"data/x\.json"):
        function.handle(messages(s3_event("data/a", "data/x/b")), clock)
    assert summary()["objects"] == {"data/a": 1}
    assert summary("summaries/data/x.json") is None


def test_lease_outlasts_the_time_left_by_two_seconds(function, clock, put, monkeypatch):
    """The lock cannot run out before Lambda has ended the function."""
    put("data/a", 1)
    runs = []
    monkeypatch.setattr(function, "update", lambda lease, *_: runs.append(lease.remaining))
    deliver(function, "data/a", left=7.5)
    assert runs == [pytest.approx(9.5, abs=0.01)]


def test_held_lock_raises_after_one_try(function, put, others, summary):
    """It does not wait for another holder: the error has the event delivered again, later."""
    put("data/a", 1)
    sent = noted(function)
    with others.acquire(LOCK), pytest.raises(simplelock.LockHeld):
        deliver(function, "data/a")
    assert sent == SENT[:2]
    assert summary() is None
    deliver(function, "data/a")
    assert summary()["objects"] == {"data/a": 1}


# How it writes


def test_undisturbed_it_sends_six_requests(function, put):
    """Lock, look, read, write, release; before the first lock, one read for DynamoDB's clock."""
    put("data/a", 1)
    sent = noted(function)
    deliver(function, "data/a")
    assert sent == SENT
    sent.clear()
    deliver(function, "data/a")
    assert sent == SENT[1:]


def test_write_is_conditional_on_what_was_read(function, s3, put):
    """A new summary must still be missing when it is written, another must have the ETag read."""
    put("data/a", 1)
    names = ("If-None-Match", "If-Match")
    conditions = at_write(function, lambda request: [request.headers.get(n) for n in names])
    deliver(function, "data/a")
    etag = s3.head_object(Bucket=BUCKET, Key=SUMMARY)["ETag"]
    deliver(function, "data/a")
    assert conditions == [[b"*", None], [None, etag.encode()]]


def test_summary_carries_the_fencing_token_of_its_lease(function, put, summary, others):
    """The token in the body is the lease's, and later holders write higher ones."""
    put("data/a", 1)
    tokens = at_write(function, lambda _: others.holder(LOCK).fencing_token)
    for _ in range(3):
        deliver(function, "data/a")
        assert summary()["fencing_token"] == tokens[-1]
    assert tokens == sorted(set(tokens))


def test_write_of_an_earlier_holder_is_read_again(function, s3, put, summary):
    """A paused holder's write may come between our read and our write: both are kept."""
    put("data/a", 1)
    late = [{"fencing_token": 1, "objects": {"data/z": 26}, "bytes": 26}]

    def intrude(operation, _):
        if operation == "PutObject" and late:
            s3.put_object(Bucket=BUCKET, Key=SUMMARY, Body=json.dumps(late.pop()))

    watch(function, intrude)
    sent = noted(function)
    deliver(function, "data/a")
    assert summary()["objects"] == {"data/a": 1, "data/z": 26}
    assert sent == [*SENT[:4], "PutObject", "GetObject", *SENT[4:]]


def test_lost_reply_to_its_write_is_no_conflict(function, clock, put, summary, others):
    """The SDK's second PUT meets what its first has written: 412, and it is written again."""
    put("data/a", 1)
    fault = [faults.failed]

    def lose(operation, request):
        return fault.pop()(request) if operation == "PutObject" and fault else None

    watch(function, lose)
    sent = noted(function)
    deliver(function, "data/a")
    assert summary()["objects"] == {"data/a": 1}
    assert sent == [*SENT[:4], "PutObject", "PutObject", "GetObject", *SENT[4:]]
    assert others.holder(LOCK) is None


def refusing(function, operation, status):
    """Have one request of the function refused with a status; `left` is what is still to be so."""
    send, left = getattr(function.s3, operation), [status]

    def refuse(**request):
        if not left:
            return send(**request)
        reply = {"Error": {"Code": "x"}, "ResponseMetadata": {"HTTPStatusCode": left.pop()}}
        raise ClientError(reply, operation)

    return refuse


def test_conflict_of_two_writes_under_way_is_read_again(function, put, summary, monkeypatch):
    """S3 answers 409 where it cannot say who is first."""
    put("data/a", 1)
    monkeypatch.setattr(function.s3, "put_object", refusing(function, "put_object", 409))
    sent = noted(function)
    deliver(function, "data/a")
    assert summary()["objects"] == {"data/a": 1}
    assert sent.count("GetObject") == 2


def test_conflicts_without_end_end_with_the_lease(function, clock, put, monkeypatch):
    """It reads again only for as long as it surely holds the lock."""
    put("data/a", 1)
    tries = []

    def refuse(**_):
        clock.tick(1)
        tries.append(len(tries))
        assert len(tries) < 2 * LEFT
        reply = {"Error": {"Code": "x"}, "ResponseMetadata": {"HTTPStatusCode": 409}}
        raise ClientError(reply, "PutObject")

    monkeypatch.setattr(function.s3, "put_object", refuse)
    with pytest.raises(simplelock.LockLost):
        deliver(function, "data/a")
    assert len(tries) == LEFT + 2


@pytest.mark.parametrize(
    ("operation", "status"),
    [
        ("head_object", 403),
        ("get_object", 403),
        ("put_object", 403),
        ("put_object", 404),  # IfMatch, and somebody has deleted the summary
        ("put_object", 500),
    ],
)
def test_other_refusals_are_raised(function, put, summary, others, monkeypatch, operation, status):
    """What is forbidden is not taken for gone or changed, and the lock is given back."""
    put("data/a", 1)
    deliver(function, "data/a")
    before = summary()
    monkeypatch.setattr(function.s3, operation, refusing(function, operation, status))
    with pytest.raises(ClientError):
        deliver(function, "data/a")
    assert summary() == before
    assert others.holder(LOCK) is None


# Paused, killed


@pytest.mark.parametrize(
    ("step", "checks"), [(3, True), (4, True), (5, True), *((step, False) for step in range(1, 7))]
)
def test_paused_at_any_step_it_overwrites_nothing_newer(function, clock, put, summary, monkeypatch, step, checks):
    """Field case 28: paused past its lease before any request, its write is refused."""
    if not checks:  # as if its own clocks had stood still: the fence is enough
        monkeypatch.setattr("simplelock.Lease.check", lambda _: None)
    put("data/a", 1)
    put("data/b", 10)
    deliver(load(), "data/b")
    sent, statuses = [], []

    def pause(operation, _):
        sent.append(operation)
        if len(sent) == step:
            clock.tick(LEFT + 2 + 5)
            put("data/a", 2)
            put("data/c", 20)
            deliver(load(), "data/a", "data/c")

    watch(function, pause)
    function.s3.meta.events.register(
        "after-call.s3.PutObject",
        lambda http_response, **_: statuses.append(http_response.status_code),
    )
    lost = pytest.raises(simplelock.LockLost) if step >= 3 else contextlib.nullcontext()
    with lost:
        deliver(function, "data/a")
    assert sent[step - 1] == SENT[step - 1]
    # Before it has the lock, it is only late. Then nothing of it is written any more, but for the
    # last step, when it was before the pause.
    assert statuses == {1: [200], 2: [200], 5: [412], 6: [200]}.get(step, [])
    assert summary()["objects"] == {"data/a": 2, "data/b": 10, "data/c": 20}


class KilledError(BaseException):
    """Stands for SIGKILL: nothing of the module or the handler catches it."""


@pytest.mark.parametrize("step", range(1, 7))
def test_killed_at_any_step_its_event_is_handled_again(function, clock, put, summary, step):
    """Without `finally`, the lock is free at the next delivery, and nothing is lost or doubled."""
    put("data/a", 1)
    sent = []

    def kill(operation, _):
        sent.append(operation)
        if len(sent) >= step:
            raise KilledError

    watch(function, kill)
    with pytest.raises(KilledError):
        deliver(function, "data/a")
    if step >= 3:
        with pytest.raises(simplelock.LockHeld):
            deliver(load(), "data/a")
    clock.tick(properties("Events")["VisibilityTimeout"])
    deliver(load(), "data/a")
    assert summary()["objects"] == {"data/a": 1}
    assert summary()["bytes"] == 1


# The template


def packaged():
    """The template after `aws cloudformation package`, with the code uploaded."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as files:
        files.write(FOLDER / "handler.py", "handler.py")
        files.write(simplelock.__file__, "simplelock.py")
    s3 = boto3.client("s3", region_name="us-east-1")
    s3.create_bucket(Bucket="artifacts")
    s3.put_object(Bucket="artifacts", Key="guard.zip", Body=archive.getvalue())
    template = copy.deepcopy(TEMPLATE)
    template["Resources"]["Function"]["Properties"]["Code"] = {
        "S3Bucket": "artifacts",
        "S3Key": "guard.zip",
    }
    return json.dumps(template)


@pytest.fixture
def _moto():
    """One for each test: what is deployed here is more than a table, and goes with it."""
    with mock_aws():
        yield


@pytest.fixture(params=["own table", "existing table"])
def stack(request, monkeypatch):
    """The outputs of a deployed stack, with the environment that its function has."""
    with mock_aws():
        monkeypatch.setattr(boto3, "DEFAULT_SESSION", session())
        parameters = {"BucketName": BUCKET}
        if request.param == "existing table":
            simplelock.LockTable("Locks").create()
            parameters["LockTableName"] = "Locks"
        cloudformation = boto3.client("cloudformation")
        with pytest.warns(UserWarning, match="QueuePolicy"):  # which moto does not know
            cloudformation.create_stack(
                StackName="guard",
                TemplateBody=packaged(),
                Capabilities=["CAPABILITY_IAM"],
                Parameters=[{"ParameterKey": name, "ParameterValue": value} for name, value in parameters.items()],
            )
        (described,) = cloudformation.describe_stacks(StackName="guard")["Stacks"]
        assert described["StackStatus"] == "CREATE_COMPLETE"
        (made,) = boto3.client("lambda").list_functions()["Functions"]
        for name, value in made["Environment"]["Variables"].items():
            monkeypatch.setenv(name, value)
        yield {each["OutputKey"]: each["OutputValue"] for each in described["Outputs"]}


def grants_of(role):
    """The (action, resource, pattern of lock names) that a role is granted, one by one."""
    reply = boto3.client("iam").get_role_policy(RoleName=role, PolicyName="guard")
    # moto returns the document as Python would print it, which YAML understands.
    for statement in yaml.safe_load(str(reply["PolicyDocument"]))["Statement"]:
        assert statement["Effect"] == "Allow"
        names = "*"
        if "Condition" in statement:
            patterns, asked = statement["Condition"].values()
            assert list(statement["Condition"]) == ["ForAllValues:StringLike", "Null"]
            assert asked == {"dynamodb:LeadingKeys": "false"}
            (names,) = patterns["dynamodb:LeadingKeys"]
        for action, resource in itertools.product(as_list(statement["Action"]), as_list(statement["Resource"])):
            yield action, resource, names


def as_list(value):
    return value if isinstance(value, list) else [value]


def needs_of(function):
    """What IAM is asked for the requests of the function, gathered as they are sent."""
    needs = set()

    def note(params, model, **_):
        if "Bucket" in params:
            action = model.name.replace("Head", "Get")
            needs.add((f"s3:{action}", f"{BUCKET_ARN}/{params['Key']}", ""))
        else:
            table = f"arn:aws:dynamodb:eu-west-1:123456789012:table/{params['TableName']}"
            needs.add((f"dynamodb:{model.name}", table, params["Key"]["LockID"]["S"]))

    def note_missing(http_response, **_):
        if http_response.status_code == 404:
            needs.add(("s3:ListBucket", BUCKET_ARN, ""))

    for client in (function.s3, function.locks.client):
        client.meta.events.register("before-parameter-build", note)
    function.s3.meta.events.register("after-call", note_missing)
    return needs


def test_role_grants_what_is_sent_and_nothing_more(stack):
    """Field case 34: all requests are within the role's policy, and each grant has a request."""
    s3, function = boto3.client("s3"), load()
    needs = needs_of(function)
    s3.put_object(Bucket=BUCKET, Key="data/a", Body=b"x")
    deliver(function, "data/a")  # the first
    s3.delete_object(Bucket=BUCKET, Key="data/a")
    deliver(function, "data/a", name="ObjectRemoved:Delete")
    others = simplelock.LockTable(os.environ["LOCK_TABLE"], fencing=True)
    with others.acquire(LOCK), pytest.raises(simplelock.LockHeld):
        deliver(function, "data/a")
    assert len({action for action, *_ in needs}) == 5
    grants = set(grants_of(stack["FunctionRole"]))
    # What Lambda sends in the function's name, to this stack's queue and log group.
    queue = attributes_of(stack["Events"])["QueueArn"]
    needs |= {(f"sqs:{each}Message", queue, "") for each in ("Receive", "Delete")}
    needs.add(("sqs:GetQueueAttributes", queue, ""))
    (log,) = boto3.client("logs").describe_log_groups()["logGroups"]
    log_arn = log["arn"].removesuffix(":*")  # moto's GetAtt lacks the end that AWS's has
    needs |= {(f"logs:{each}", log_arn, "") for each in ("CreateLogStream", "PutLogEvents")}

    def covers(grant, need):
        return all(itertools.starmap(fnmatch.fnmatchcase, zip(need, grant, strict=True)))

    assert {(action, resource) for action, resource, _ in grants if action.startswith("s3:")} == {
        ("s3:GetObject", f"{BUCKET_ARN}/data/*"),
        ("s3:GetObject", f"{BUCKET_ARN}/summaries/*"),
        ("s3:PutObject", f"{BUCKET_ARN}/summaries/*"),
        ("s3:ListBucket", BUCKET_ARN),
    }
    assert {names for *_, names in grants} == {"*", f"s3://{BUCKET}/summaries/*"}
    assert [need for need in needs if not any(covers(grant, need) for grant in grants)] == []
    assert [grant for grant in grants if not any(covers(grant, need) for need in needs)] == []


def attributes_of(queue):
    sqs = boto3.client("sqs")
    return sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["All"])["Attributes"]


def test_deployed_function_is_invoked_by_its_queue(stack):
    """One message at a time, at most two at once; what fails ends in the dead-letter queue."""
    (mapping,) = boto3.client("lambda").list_event_source_mappings()["EventSourceMappings"]
    events, dead_letters = attributes_of(stack["Events"]), attributes_of(stack["DeadLetters"])
    assert mapping["EventSourceArn"] == events["QueueArn"]
    assert mapping["BatchSize"] == 1
    assert mapping["ScalingConfig"] == {"MaximumConcurrency": 2}
    assert json.loads(events["RedrivePolicy"]) == {
        "deadLetterTargetArn": dead_letters["QueueArn"],
        "maxReceiveCount": 100,
    }


def test_template_makes_a_table_only_where_none_is_given(stack, request):
    """The function locks in the table given, or in the stack's own."""
    tables = boto3.client("dynamodb").list_tables()["TableNames"]
    assert tables == [stack["LockTableName"]]
    assert os.environ["LOCK_TABLE"] == stack["LockTableName"]
    assert ("existing" in request.node.name) == (tables == ["Locks"])


def test_own_table_is_as_the_lock_tables_template_has_it():
    """Field cases 36 and 37: same keys, same TTL, and both policies are Retain."""
    table = templates.load("table.yaml")
    general = table["Resources"]["LockTable"]
    for part in (
        *("BillingMode", "KeySchema", "AttributeDefinitions"),
        *("TimeToLiveSpecification", "PointInTimeRecoverySpecification"),
    ):
        assert properties("LockTable")[part] == general["Properties"][part]
    for part in ("DeletionPolicy", "UpdateReplacePolicy"):
        assert RESOURCES["LockTable"][part] == RESOURCES["Bucket"][part] == general[part]


def test_its_own_writes_do_not_invoke_it(function, s3, put, summary):
    """The template's filters let through what happens under data/, not what the handler writes."""
    sqs = boto3.client("sqs")
    queue = sqs.create_queue(QueueName="events")["QueueUrl"]
    # moto's CloudFormation leaves notifications out, so they are set by the API.
    configurations = properties("Bucket")["NotificationConfiguration"]["QueueConfigurations"]
    s3.put_bucket_notification_configuration(
        Bucket=BUCKET,
        NotificationConfiguration={
            "QueueConfigurations": [
                {
                    "QueueArn": attributes_of(queue)["QueueArn"],
                    "Events": [each["Event"]],
                    "Filter": {"Key": {"FilterRules": each["Filter"]["S3Key"]["Rules"]}},
                }
                for each in configurations
            ]
        },
    )

    def deliver():
        received = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10).get("Messages", [])
        bodies = [json.loads(message["Body"]) for message in received]
        for message, body in zip(received, bodies, strict=True):
            function.handle(messages(body), context(LEFT))
            sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
        return [r["eventName"] for body in bodies for r in body.get("Records", [])]

    assert deliver() == []  # at most test events
    put("data/this im + age.txt", 5)
    assert deliver() == ["ObjectCreated:Put"]
    assert summary()["objects"] == {"data/this im + age.txt": 5}
    s3.delete_object(Bucket=BUCKET, Key="data/this im + age.txt")
    assert deliver() == ["ObjectRemoved:Delete"]
    assert summary()["objects"] == {}
    assert deliver() == []


def test_notification_covers_every_way_an_object_changes():
    """Created, removed, and expired by a lifecycle rule, which S3 reports apart."""
    configurations = properties("Bucket")["NotificationConfiguration"]["QueueConfigurations"]
    events = "s3:ObjectCreated:*", "s3:ObjectRemoved:*", "s3:LifecycleExpiration:*"
    assert tuple(each["Event"] for each in configurations) == events


def test_only_its_bucket_may_send_to_the_queue():
    """S3 may send for this bucket of this account, before the bucket is made."""
    policy = properties("EventsPolicy")
    (statement,) = policy["PolicyDocument"]["Statement"]
    assert policy["Queues"] == [{"Ref": "Events"}]
    assert RESOURCES["Bucket"]["DependsOn"] == "EventsPolicy"
    assert statement["Principal"] == {"Service": "s3.amazonaws.com"}
    assert statement["Action"] == "sqs:SendMessage"
    assert statement["Resource"] == {"Fn::GetAtt": ["Events", "Arn"]}
    assert statement["Condition"] == {
        "ArnEquals": {"aws:SourceArn": {"Fn::Sub": "arn:${AWS::Partition}:s3:::${BucketName}"}},
        "StringEquals": {"aws:SourceAccount": {"Ref": "AWS::AccountId"}},
    }


def test_retry_comes_after_the_lease_of_a_killed_function(function):
    """The next delivery finds its lock free; and a function is given time enough to start."""
    timeout, retry = properties("Function")["Timeout"], properties("Events")["VisibilityTimeout"]
    assert retry >= 6 * timeout  # as Lambda asks for
    assert retry > timeout + 2 + 3  # an expiry is up to 3 s late
    assert timeout > function.ENOUGH


def test_function_is_what_the_folder_holds(function):
    """The handler's name is right, its code is the folder, and it logs where logs are deleted."""
    made = properties("Function")
    assert made["Handler"] == f"handler.{function.handle.__name__}"
    assert made["Code"] == "."
    assert made["LoggingConfig"] == {"LogGroup": {"Ref": "Log"}}
    assert properties("Log")["RetentionInDays"] == 30


@pytest.mark.parametrize(
    ("parameter", "good", "bad"),
    [
        ("BucketName", ["my-data", "a.b.c"], ["", "ab", "My-data", "a*b", "-ab", "x" * 64]),
        ("LockTableName", ["", "Locks", "a.b"], ["ab", "a b", "a/b", "x" * 256]),
    ],
)
def test_template_parameter_takes_only_what_it_can_use(parameter, good, bad):
    """What S3 or DynamoDB would refuse, or IAM read as a pattern, does not get into the stack."""
    pattern = TEMPLATE["Parameters"][parameter]["AllowedPattern"]
    assert [value for value in good if not re.search(pattern, value)] == []
    assert [value for value in bad if re.search(pattern, value)] == []


def test_skipped_checks_of_the_guard_carry_their_reasons():
    """A checkov check is skipped only in the template, where its reason stands beside it."""
    skips = [
        skip
        for resource in RESOURCES.values()
        for skip in resource.get("Metadata", {}).get("checkov", {}).get("skip", [])
    ]
    assert skips
    assert [skip["id"] for skip in skips if not skip.get("comment")] == []


# Eight invocations at once, as processes. Each puts its objects, and has each of its events
# delivered until it is handled, as the queue does. A fault strikes once, before a request to the
# summary.
INVOCATION = """
import json, os, random, signal, sys, time
import handler
from simplelock import LockHeld, LockLost

class Context:
    @staticmethod
    def get_remaining_time_in_millis():
        return 500

handler.ENOUGH = 0.1  # so that leases of 2.5 s are long enough
bucket, summary, updates, fault = json.loads(sys.argv[1])
outcomes = []

def strike(request, **_):
    global fault
    if fault and summary in request.url:
        name, fault = fault[1], None
        os.kill(os.getpid(), getattr(signal, name))

if fault:
    handler.s3.meta.events.register_first(f"before-send.s3.{fault[0]}", strike)
handler.s3.meta.events.register(
    "after-call.s3.PutObject", lambda http_response, **_: outcomes.append(http_response.status_code)
)
for key, size in updates:
    handler.s3.put_object(Bucket=bucket, Key=key, Body=b"x" * size)
    body = {"Records": [{"s3": {"bucket": {"name": bucket}, "object": {"key": key}}}]}
    event = {"Records": [{"body": json.dumps(body)}]}
    while True:
        try:
            handler.handle(event, Context)
            break
        except LockHeld:
            time.sleep(random.uniform(0.02, 0.1))
        except LockLost as error:
            outcomes.append(error.reason)
print(json.dumps(outcomes))
"""


@contextlib.contextmanager
def serving():
    """Serve moto from one thread: with more, it lets two writers win, in DynamoDB and in S3."""
    from moto.moto_server import werkzeug_app
    from werkzeug.serving import make_server

    class Quiet(werkzeug_app.MotoRequestHandler):
        protocol_version = "HTTP/1.1"  # with 1.0, boto3 waits in vain for a "100 Continue"

        def log_request(self, *_):
            pass

    app = werkzeug_app.DomainDispatcherApplication(werkzeug_app.create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=False, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        requests.post(f"{url}/moto-api/reset", timeout=60)
        yield url
        requests.post(f"{url}/moto-api/reset", timeout=60)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def until_stopped(process, seconds=60):
    deadline = time.monotonic() + seconds
    while not (told := os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG))[0]:
        assert time.monotonic() < deadline, "it was not stopped"
        time.sleep(0.02)
    assert os.WIFSTOPPED(told[1])


def history_of(s3, summary):
    """Every version of the summary, the oldest first."""
    versions = s3.list_object_versions(Bucket=BUCKET, Prefix=summary)["Versions"]
    return [
        json.load(s3.get_object(Bucket=BUCKET, Key=summary, VersionId=each["VersionId"])["Body"])
        for each in reversed(versions)
    ]


@pytest.mark.rig
def test_of_concurrent_invocations_no_update_is_lost_or_made_twice(monkeypatch):
    """Field case 28: 8 processes on one summary, one killed, two paused past their leases."""
    # The last object of each is the first again, larger.
    updates = [[[f"data/{n}-{size}", size] for size in range(1, 6)] + [[f"data/{n}-1", 6]] for n in range(8)]
    struck = [["PutObject", "SIGKILL"], ["PutObject", "SIGSTOP"], ["GetObject", "SIGSTOP"]]
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving())
        for name, value in {
            "AWS_ENDPOINT_URL": url,
            "LOCK_TABLE": "Locks",
            "NO_PROXY": "127.0.0.1",
            "PYTHONPATH": f"{pathlib.Path(simplelock.__file__).parent}{os.pathsep}{FOLDER}",
        }.items():
            monkeypatch.setenv(name, value)
        s3 = stack.enter_context(contextlib.closing(boto3.client("s3", region_name="us-east-1")))
        s3.create_bucket(Bucket=BUCKET)
        s3.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
        locks = simplelock.LockTable("Locks", fencing=True)
        locks.create()
        stack.callback(locks.client.close)

        def invoke(updates, fault=None):
            arguments = json.dumps([BUCKET, SUMMARY, updates, fault])
            process = subprocess.Popen([sys.executable, "-c", INVOCATION, arguments], stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)  # a stopped one heeds nothing else
            return process

        started = time.monotonic()
        running = [invoke(each, struck[n] if n < len(struck) else None) for n, each in enumerate(updates)]
        killed, *paused = running[: len(struck)]
        assert killed.wait(60) == -signal.SIGKILL
        running[0] = invoke(updates[0])  # its events are delivered to another
        superseded = []
        for process, own in zip(paused, updates[1:], strict=False):
            until_stopped(process)
            # While it is paused, its object changes, and another handles that event.
            key, size = own[0]
            superseded.append([key, size])
            own.append([key, 7])
            assert invoke([own[-1]]).wait(60) == 0
            process.send_signal(signal.SIGCONT)
        outcomes = [json.loads(process.communicate(timeout=60)[0]) for process in running]
        history = history_of(s3, SUMMARY)
        took = time.monotonic() - started
        assert locks.holder(LOCK) is None

    steps = list(itertools.pairwise([{}, *(version["objects"] for version in history)]))
    changes = [after.items() - before.items() for before, after in steps]
    found = [list(update) for each in changes for update in each]
    expected = [update for own in updates for update in own if update not in superseded]
    counts = f"updates expected: {len(expected)}, found: {len(found)}"
    print(f"\n{counts}; {len(history)} writes, {took:.1f} s")  # .ci/run looks for it
    assert sorted(found) == sorted(expected)
    assert [before.keys() - after.keys() for before, after in steps if before.keys() - after.keys()] == []
    assert max(len(each) for each in changes) == 1  # 0, where an event was delivered again
    tokens = [version["fencing_token"] for version in history]
    assert tokens == sorted(set(tokens))
    late_write, late_read = outcomes[1:3]
    assert 412 in late_write
    assert "a later holder has written the summary" in late_read
