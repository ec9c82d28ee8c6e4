"""Strict JAX for the whole suite, set before JAX is imported anywhere."""

import gc
import os
from collections import defaultdict
from importlib.metadata import version

# CPU only: with the CUDA plugin installed and no driver, JAX would look for a GPU,
# and the ahead-of-time GPU compiler of `tests/h100.py` would not be registered.
os.environ["JAX_PLATFORMS"] = "cpu"
# What is compiled here runs a few times: it is not worth optimising.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1 "
    # A machine that stands still for a minute must not abort a sharded program.
    "--xla_cpu_collective_call_terminate_timeout_seconds=300"
    # JAX < 0.11: a way to compile fused operations that takes half the time.
    + " --xla_cpu_use_fusion_emitters=false"
    * version("jaxlib").startswith("0.10."),
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def mark_breadth(items):
    """Marks the cases of a test slow or nightly, but for as many as its `breadth` says.

    Those of a suite are the first, the last and others as far apart: the lists of cases
    put what is alike together.
    """
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("breadth") and not (
            item.get_closest_marker("slow") or item.get_closest_marker("nightly")
        ):
            cases[item.nodeid.split("[")[0]].append(item)
    for of_a_test in cases.values():
        breadth = of_a_test[0].get_closest_marker("breadth")
        by_default = spread(of_a_test, breadth.args[0])
        others = [item for item in of_a_test if item not in by_default]
        slow = spread(others, breadth.kwargs.get("slow", len(others)))
        for item in others:
            item.add_marker(pytest.mark.slow if item in slow else pytest.mark.nightly)


def spread(items, count):
    """Returns so many of a list: the first, the last, and others as far apart."""
    last = len(items) - 1
    places = {n * last // max(count - 1, 1) for n in range(min(count, len(items)))}
    return [items[place] for place in sorted(places)]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items):
    """One worker for a file or a group (`--dist loadgroup`): they share programs."""
    mark_breadth(items)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
    result = yield
    # pytest-xdist 3.8 adds the group to a name that pytest 9.2 does not read.
    for item in items:
        if hasattr(item, "id") and hasattr(item, "_nodeid"):
            item._id = type(item.id).parse(item._nodeid)
    return result


def pytest_collection_finish():
    # What was imported and collected lives on: it is not looked through for garbage.
    gc.freeze()
    gc.set_threshold(20_000)
