"""Fixtures of the fault rig: engines, a fault proxy, clients and tables."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import engines
from .proxy import Proxy

HERE = Path(__file__).parent
NUMBERS = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("rig")


@pytest.fixture(scope="session", autouse=True)
def no_aws_settings() -> Iterator[None]:
    """Keep the user's AWS settings, credentials and web proxy out of here and of every child."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("AWS_"):
                patch.delenv(name)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.setenv(name, os.devnull)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "rig")
        patch.setenv("AWS_DEFAULT_REGION", engines.REGION)
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1")
        yield


@pytest.fixture(scope="session", params=engines.NAMES)
def engine(request: pytest.FixtureRequest, no_aws_settings: None) -> Iterator[engines.Engine]:
    """Each engine in turn, one process for all of its tests."""
    try:
        with engines.running(request.param) as engine:
            yield engine
    except engines.NotInstalled as error:
        if os.environ.get("SIMPLELOCK_RIG_REQUIRE"):  # a missing engine must not look like a pass
            raise
        pytest.skip(str(error))


@pytest.fixture
def proxy(engine: engines.Engine) -> Iterator[Proxy]:
    """A proxy before the engine, without faults or records from another test."""
    with Proxy.before(engine) as proxy:
        yield proxy


@pytest.fixture
def make_client() -> Iterator[Any]:
    """`engines.make_client`; what it made is closed afterwards."""
    clients = []

    def make(target: Any, **settings: Any) -> Any:
        clients.append(engines.make_client(target, **settings))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def table(engine: engines.Engine, make_client: Any) -> str:
    """The name of a fresh table for locks."""
    name = f"Locks-{next(NUMBERS)}"
    engines.make_table(make_client(engine), name)
    return name
