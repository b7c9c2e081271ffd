"""Faults between the client and DynamoDB: what the `meets` fixture lets a request meet.

Each is a handler of botocore's `before-send` event, so it takes the place of one single send; that
it is sent again after some of them is the SDK's own doing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import ConnectionClosedError, ConnectTimeoutError, ReadTimeoutError
from moto.core.botocore_stubber import MockRawResponse
from moto.core.models import botocore_stubber

Fault = Callable[[AWSPreparedRequest], AWSResponse | None]


def deliver(request: AWSPreparedRequest) -> AWSResponse:
    """Let DynamoDB apply the request, and return its reply."""
    return botocore_stubber("before-send", request)


def lost(request: AWSPreparedRequest) -> AWSResponse:
    """It is applied, and the reply never comes."""
    deliver(request)
    raise ReadTimeoutError(endpoint_url=request.url)


def dropped(request: AWSPreparedRequest) -> AWSResponse:
    """It is applied, and the connection breaks before the reply."""
    deliver(request)
    raise ConnectionClosedError(endpoint_url=request.url)


def failed(request: AWSPreparedRequest) -> AWSResponse:
    """It is applied, and all the same answered with a server error."""
    deliver(request)
    return _reply(request, 500, {}, b"{}")


def cut(request: AWSPreparedRequest) -> AWSResponse:
    """It is applied, and of the reply only the headers come through."""
    reply = deliver(request)
    return _reply(request, reply.status_code, reply.headers, b"")


def interrupted(request: AWSPreparedRequest) -> AWSResponse:
    """It is applied, and somebody presses Ctrl-C before the reply."""
    deliver(request)
    raise KeyboardInterrupt


def bare(request: AWSPreparedRequest) -> AWSResponse:
    """It is applied; a refusal comes without the item, as from engines that do not send it."""
    reply = deliver(request)
    body = {name: value for name, value in json.loads(reply.content).items() if name != "Item"}
    return _reply(request, reply.status_code, reply.headers, json.dumps(body).encode())


def undated(request: AWSPreparedRequest) -> AWSResponse:
    """It is applied, and something on the way strips the reply of its date."""
    return dated(None)(request)


def dated(date: str | None) -> Fault:
    """It is applied, and the reply carries this for a date."""

    def fault(request: AWSPreparedRequest) -> AWSResponse:
        reply = deliver(request)
        headers = {name: text for name, text in reply.headers.items() if name.lower() != "date"}
        if date is not None:
            headers["Date"] = date
        return _reply(request, reply.status_code, headers, reply.content)

    return fault


def slow(seconds: float, *, then: Fault = deliver, pause: Callable[[float], object] | None = None) -> Fault:
    """It is applied at once, and the reply, or another fault's, takes its time."""

    def fault(request: AWSPreparedRequest) -> AWSResponse:
        reply = then(request)
        (pause or time.sleep)(seconds)
        return _reply(request, reply.status_code, reply.headers, reply.content)

    return fault


def unsent(request: AWSPreparedRequest) -> AWSResponse:
    """It is not applied: nobody answers at that address."""
    raise ConnectTimeoutError(endpoint_url=request.url)


def unavailable(request: AWSPreparedRequest) -> AWSResponse:
    """It is not applied, and answered with a server error."""
    return _reply(request, 500, {}, b"{}")


def held_back(requests: list[AWSPreparedRequest]) -> Fault:
    """It is not applied yet, and nothing comes back; `deliver` it later from `requests`."""

    def fault(request: AWSPreparedRequest) -> AWSResponse:
        requests.append(request)
        raise ReadTimeoutError(endpoint_url=request.url)

    return fault


def refused(code: str, **details: Any) -> Fault:
    """It is not applied, and answered with this error code."""

    def fault(request: AWSPreparedRequest) -> AWSResponse:
        body = {"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": code, **details}
        return _reply(request, 400, {}, json.dumps(body).encode())

    return fault


def after(action: Callable[[], object]) -> Fault:
    """It is applied, but something else happens first."""

    def fault(_: AWSPreparedRequest) -> None:
        action()

    return fault


def _reply(request: AWSPreparedRequest, status: int, headers: Any, body: bytes) -> AWSResponse:
    url, request.url = request.url, "http://applied.invalid/"  # moto would apply it once more
    kept = {name: text for name, text in headers.items() if name.lower() != "x-amz-crc32"}
    return AWSResponse(url, status, kept, MockRawResponse(body))
