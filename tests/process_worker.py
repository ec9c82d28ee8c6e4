"""One process of a distributed training run on CPUs; `test_processes.py` starts it.

    python -m tests.process_worker PROCESS PROCESSES PORT DEVICES

The processes find each other on this machine, train as one over the devices of all and
each prints what it has in the end as one line of JSON.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_amp as amp
from tests.training import test_sharded_scaling as sharded

# The second step of the runs: a number that the last quarter of the devices holds.
BATCHES = (
    sharded.good_batch(0),
    sharded.bad_batch("overflow"),
    *map(sharded.good_batch, (1, 2, 3)),
)


def placed(array: Any, sharding: NamedSharding) -> jax.Array:
    """A global array, of which each process provides what its devices hold."""
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at])


def whole_arrays(name: str) -> dict[str, Any]:
    """Trains under `jit` with arrays that lie as in the layout called `name`."""
    layout = sharded.LAYOUTS[name]
    mesh, tx = sharded.mesh_of(layout), sharded.scaled_adam()
    start = sharded.parameters(), tx.init(sharded.parameters())
    # Placed as a step returns them, or it would be compiled twice.
    shardings = sharded.shardings_of(start, mesh, layout.specs)
    params, state = jax.tree.map(placed, start, shardings)
    step = jax.jit(sharded.half_step(tx))
    rows = NamedSharding(mesh, layout.batch)
    losses, kept = [], True
    for number, batch in enumerate(BATCHES):
        batch = jax.tree.map(lambda leaf: placed(leaf, rows), batch)
        before = sharded.shards((params, state.inner_state))
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
        if number == 1:
            kept = before == sharded.shards((params, state.inner_state))
            bad_here = any(
                np.abs(shard.data).max() > 1e6
                for shard in batch["y"].addressable_shards
            )
            scale = sharded.on_every_device(amp.loss_scale_of(state).value)
    return {
        "losses": losses,
        "kept": kept,
        "bad_here": bad_here,
        "scale_of_the_bad_step": scale,
        "metrics": sharded.counters(state),
        **contents(params),
        "moments": contents(state.inner_state[0].mu)["digest"],
    }


def contents(params: Any) -> dict[str, Any]:
    """The whole parameters, read by every process from all of them."""
    whole = multihost_utils.process_allgather(params, tiled=True)
    leaves = jax.tree.leaves(whole)
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves))
    params = {name: np.asarray(leaf).tolist() for name, leaf in whole.items()}
    return {"digest": digest.hexdigest(), "params": params}


def replicas(axis_name: str | None) -> dict[str, Any]:
    """One step of replicas with gradients of their own, one of them not finite."""
    mesh = sharded.mesh_of(sharded.LAYOUTS["data parallel"])
    tx, step = sharded.replicas(axis_name, check_vma=True)
    everywhere = NamedSharding(mesh, P())
    params = jax.tree.map(lambda leaf: placed(leaf, everywhere), sharded.parameters())
    rows = NamedSharding(mesh, P("data"))
    batch = jax.tree.map(lambda leaf: placed(leaf, rows), BATCHES[1])
    averages = placed(sharded.AVERAGES, rows)
    _, state, _ = step(params, tx.init(params), batch, averages)
    return {"scale": sharded.on_every_device(amp.metrics(state)["scale"])}


RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "fsdp": functools.partial(whole_arrays, "fsdp"),
    "replicas": functools.partial(replicas, "data"),
    "replicas that do not agree": functools.partial(replicas, None),
}


def main(process: int, processes: int, port: int, devices: int) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", processes, process, initialization_timeout=60
    )
    assert jax.process_count() == processes
    assert jax.local_device_count() == devices
    results = {name: run() for name, run in RUNS.items()}
    print(json.dumps(results), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
