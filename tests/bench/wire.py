"""What lies between botocore and the network: it counts requests, and can answer them itself."""

from __future__ import annotations

import io
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any

from botocore.awsrequest import AWSResponse

TABLE = {
    "AttributeDefinitions": [{"AttributeName": "LockID", "AttributeType": "S"}],
    "TableName": "Locks",
    "KeySchema": [{"AttributeName": "LockID", "KeyType": "HASH"}],
    "TableStatus": "ACTIVE",
    "CreationDateTime": 1767225600.0,
    "ProvisionedThroughput": {
        "NumberOfDecreasesToday": 0,
        "ReadCapacityUnits": 0,
        "WriteCapacityUnits": 0,
    },
    "TableSizeBytes": 0,
    "ItemCount": 0,
    "TableArn": "arn:aws:dynamodb:us-east-1:123456789012:table/Locks",
    "TableId": "12345678-1234-1234-1234-123456789012",
    "BillingModeSummary": {"BillingMode": "PAY_PER_REQUEST"},
}
CAPACITY = b'{"ConsumedCapacity": {"TableName": "Locks", "CapacityUnits": 1.0}}'
DESCRIPTION = json.dumps({"Table": TABLE}).encode()


class Wire:
    """Note each request that a session's clients send; `offline`, answer it as the table would."""

    def __init__(self, session: Any, *, offline: bool) -> None:
        self.sent: list[str] = []  # a list, because threads can append to it without a mutex
        self.log: list[tuple[float, bytes]] | None = None  # when and what, where that is wanted
        self._offline = offline
        self._put = b""
        self._date = (0, "")
        session.register("before-send.dynamodb", self._before_send)

    def count(self) -> Counter[str]:
        """How many were sent, by operation, since the last count."""
        sent, self.sent = self.sent, []
        return Counter(sent)

    def _before_send(self, request: Any, event_name: str, **_: Any) -> AWSResponse | None:
        operation = event_name.rpartition(".")[2]
        if operation in ("GetItem", "Query"):  # what a read costs depends on it
            operation += " consistent" * (b'"ConsistentRead": true' in request.body)
        self.sent.append(operation)
        if self.log is not None:
            self.log.append((time.monotonic(), request.body))
        return self._answer(operation, request) if self._offline else None

    def _answer(self, operation: str, request: Any) -> AWSResponse:
        second = int(time.time())
        if self._date[0] != second:
            self._date = (second, formatdate(second, usegmt=True))
        headers = {"Date": self._date[1], "Content-Type": "application/x-amz-json-1.0"}
        raw = _Body(self._body(operation, request.body))
        return AWSResponse(request.url, 200, headers, raw)

    def _body(self, operation: str, sent: bytes) -> bytes:
        if operation == "DescribeTable":
            return DESCRIPTION
        if operation == "PutItem":
            self._put = sent
        elif operation == "DeleteItem":
            self._put = b""
        elif operation == "Query" and self._put:
            return json.dumps({"Items": [json.loads(self._put)["Item"]], "Count": 1}).encode()
        elif operation == "UpdateItem" and b'"ALL_NEW"' in sent:
            return json.dumps({"Attributes": _updated(json.loads(sent))}).encode()
        elif b'"ReturnConsumedCapacity"' in sent:
            return CAPACITY
        return b"{}"


class _Body(io.BytesIO):
    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self.getvalue()


def _updated(request: dict[str, Any]) -> dict[str, Any]:
    """The item after this update, as far as its plain assignments tell; each counter is at 1."""
    names, update = request.get("ExpressionAttributeNames", {}), request["UpdateExpression"]
    item = dict(request["Key"])
    for name, value in re.findall(r"(#?\w+) = (:\w+)", update):
        item[names.get(name, name)] = request["ExpressionAttributeValues"][value]
    for name in re.findall(r"(#?\w+) = if_not_exists", update):
        item[names.get(name, name)] = {"N": "1"}
    return item
