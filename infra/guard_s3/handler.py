"""Keep `summaries/<folder>.json` true to what lies in each folder of an S3 bucket.

The order, under the lock of one summary:

1. Take the lock, and a fencing token with it: the later the holder, the higher the token.
2. Look at the objects. As this comes after 1, a lower token means an older look.
3. Read the summary; give up if a holder with a higher token has written it.
4. Write it, token included, on condition that it is still what was read.

The lock lets one at a time do this work, so that nobody works in vain; it cannot stop a holder
that is paused, or whose request is delayed, from writing after its lease, when the next holder
has written. S3 has to refuse that, and it takes both halves of the fence:
- Paused between 2 and 3, a holder finds the newest summary and matches its ETag, but would put an
  old look over a newer one. `IfMatch` alone lets it; the token does not.
- Paused between 3 and 4, it has compared tokens already. The token alone lets it; `IfMatch` does
  not.

Events come at least once, and in any order. So an event only says where to look, and the summary
says what was there: to handle an event again, or late, does no harm.
"""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import unquote_plus

import boto3
from botocore.exceptions import ClientError

from simplelock import Lease, LockLost, LockTable

SUMMARIES = "summaries/"  # outside the prefix that sends events: its own writes must not invoke it
ENOUGH = 3.0  # seconds that one summary may take

s3 = boto3.client("s3")
locks = LockTable(os.environ["LOCK_TABLE"], fencing=True)


def handle(event: dict[str, Any], context: Any) -> None:
    """Handle SQS messages with S3 events; an error, `LockHeld` too, has them delivered again."""
    changed: dict[tuple[str, str], set[str]] = {}
    for message in event["Records"]:
        for record in json.loads(message["body"]).get("Records", []):  # S3's test event has none
            key = unquote_plus(record["s3"]["object"]["key"])  # here, once, and nowhere else
            summary = f"{SUMMARIES}{key.rpartition('/')[0]}.json"
            changed.setdefault((record["s3"]["bucket"]["name"], summary), set()).add(key)
    for (bucket, summary), keys in changed.items():
        left = context.get_remaining_time_in_millis() / 1000
        if left < ENOUGH:
            raise TimeoutError(f"{left:.1f} s are left, too little for {summary!r}")
        # Lambda kills at the time-out, without `finally`. Till then the lease has to last.
        with locks.acquire(f"s3://{bucket}/{summary}", ttl=left + 2) as lease:
            update(lease, bucket, summary, {key: size(bucket, key) for key in keys})


def update(lease: Lease, bucket: str, summary: str, sizes: dict[str, int | None]) -> None:
    """Write the sizes into the summary (None: the object is gone), unless we are too late."""
    while True:
        lease.check()
        content, unchanged = read(bucket, summary)
        if content["fencing_token"] > lease.fencing_token:
            raise LockLost(lease.key, lease.owner, "a later holder has written the summary")
        objects = {k: v for k, v in (content["objects"] | sizes).items() if v is not None}
        content = {"fencing_token": lease.fencing_token, "objects": objects}
        body = json.dumps(content | {"bytes": sum(objects.values())})
        try:
            s3.put_object(Bucket=bucket, Key=summary, Body=body, **unchanged)
        except ClientError as error:  # 412, and 409 for a write under way: read again
            if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (409, 412):
                raise
        else:
            return


def read(bucket: str, summary: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a summary, and the condition that it has not changed since."""
    try:
        found = s3.get_object(Bucket=bucket, Key=summary)
    except s3.exceptions.NoSuchKey:
        return {"fencing_token": 0, "objects": {}}, {"IfNoneMatch": "*"}
    return json.load(found["Body"]), {"IfMatch": found["ETag"]}


def size(bucket: str, key: str) -> int | None:
    """Look how large an object is now; None if it is gone."""
    try:
        return s3.head_object(Bucket=bucket, Key=key)["ContentLength"]
    except ClientError as error:  # a reply to HEAD has no body, so no better code than this
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
            raise
        return None
