"""Benchmarks of simplelock, beside what people would use instead. Not collected by pytest.

    python -m tests.bench [--quick] [cycle] [cold] [dead] [waiting] [leases] [growth]
    python -m tests.bench.guard

The first measures and prints (all parts, when none is named), and draws `chart.svg` from the
cycles; it needs the extra `bench`. It installs the peers and the engine in the user's cache. The
second is for CI: it fails when a cycle has become dearer.

`clients` says how each client is used, `wire` is what it talks to, `worker` is a process that works
for one of them, and `__main__` has the parts.
"""
