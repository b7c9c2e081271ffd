"""Fail when a cycle of acquire and release has become dearer: `python -m tests.bench.guard`.

It counts the requests, and compares the CPU time with that of the bare client, without network.
Both take turns, block by block, and the median of the blocks' ratios counts, so that a machine that
is busy with other things does not matter.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import botocore.session

from simplelock import LockTable

from .clients import bare_cycle, simplelock_cycle
from .wire import Wire

REQUESTS = 2
LIMIT = 1.10  # of the bare client's CPU time; it was 1.07 to 1.09 when this was set
SETTINGS = {
    "region_name": "eu-west-1",
    "aws_access_key_id": "guard",
    "aws_secret_access_key": "guard",
}


def measure(make_table: Callable[..., LockTable], blocks: int, cycles: int) -> tuple[float, float, float]:
    """Return a cycle's requests, its CPU time in µs, and the ratio to the bare client's."""
    session = botocore.session.get_session()
    wire = Wire(session, offline=True)
    client = session.create_client("dynamodb", **SETTINGS)
    bare = bare_cycle(client, "Locks")
    ours = simplelock_cycle(make_table("Locks", client=client))
    _block(bare, cycles), _block(ours, cycles)  # to warm up
    costs, requests = [], 0
    for _ in range(blocks):
        reference = _block(bare, cycles)
        wire.count()
        costs.append((_block(ours, cycles), reference))
        requests += wire.count().total()
    ratio = statistics.median(cost / reference for cost, reference in costs)
    return requests / blocks / cycles, statistics.median(cost for cost, _ in costs) * 1e6, ratio


def _block(run: Callable[[], None], cycles: int) -> float:
    start = time.process_time()
    for _ in range(cycles):
        run()
    return (time.process_time() - start) / cycles


def main(make_table: Callable[..., LockTable] = LockTable, blocks: int = 40, cycles: int = 100) -> int:
    """Return the exit status."""
    for _ in range(3):  # the median still wavers by 0.02
        requests, cpu, ratio = measure(make_table, blocks, cycles)
        print(f"a cycle: {requests:g} requests, {cpu:.0f} µs of CPU, {ratio:.3f} x the bare client")
        if requests != REQUESTS or ratio < LIMIT:
            break
    if requests != REQUESTS:
        print(f"FAIL: a cycle takes {REQUESTS} requests, not {requests:g}")
    if ratio >= LIMIT:
        print(f"FAIL: a cycle takes less than {LIMIT:.2f} times the CPU of the bare client")
    return int(requests != REQUESTS or ratio >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
