"""State that goes through a transformed function: averages, statistics, banks."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from tests.idioms.row import both, constants, integers, normals, row, weights

BATCH = both(normals(x=(16, 8)), constants(s=np.ones((8, 8))))


@row(weights(w=(8, 8)), BATCH, turns=500)
def average_that_a_product_reads(p, inputs):
    x, s = inputs["x"], inputs["s"]
    h = x @ p["w"]
    s = 0.999 * s + 0.001 * (x.T @ h)
    return {"x": x, "s": s}, x @ s


@row(weights(w=(8, 8)), BATCH, turns=500)
def average_that_nothing_else_reads(p, inputs):
    x, s = inputs["x"], inputs["s"]
    h = x @ p["w"]
    return {"x": x, "s": s + 0.001 * (x.T @ h - s)}, h


@row(weights(w=(8, 8)), BATCH, turns=500)
def average_read_before_it_is_updated(p, inputs):
    x, s = inputs["x"], inputs["s"]
    h = (x @ p["w"]) @ s
    s = s * 0.999 + (h.T @ h) * (0.001 / 16)
    return {"x": x, "s": s / jnp.sqrt(jnp.mean(s**2))}, h


class Averaging(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(8)(x)
        s = self.variable("stats", "s", jnp.ones, (8, 8))
        s.value = 0.999 * s.value + 0.001 * (x.T @ h)
        return h @ s.value


@row(weights(w=(8, 8)), BATCH, turns=500)
def average_in_a_linen_collection(p, inputs):
    x, s = inputs["x"], inputs["s"]
    params = {"Dense_0": {"kernel": p["w"], "bias": jnp.zeros(8)}}
    y, state = Averaging().apply(
        {"params": params, "stats": {"s": s}}, x, mutable=["stats"]
    )
    return {"x": x, "s": state["stats"]["s"]}, y


class Codebook(nnx.Module):
    def __init__(self, w, s):
        self.w = nnx.Param(w)
        self.s = nnx.Variable(s)

    def __call__(self, x):
        h = x @ self.w[...]
        self.s[...] = 0.999 * self.s[...] + 0.001 * (x.T @ h)
        return h @ self.s[...]


@row(weights(w=(8, 8)), BATCH, turns=500)
def average_in_an_nnx_variable(p, inputs):
    model = Codebook(p["w"], inputs["s"])
    y = model(inputs["x"])
    return {"x": inputs["x"], "s": model.s[...]}, y


def clusters(rng):
    centers = 4.0 * np.eye(8)
    x = centers[np.arange(64) % 8] + rng.normal(scale=0.3, size=(64, 8))
    return {"x": np.float32(x), "m": np.float32(3.0 * np.eye(8)), "n": np.ones(8, "f")}


@row(
    lambda rng: {"w": np.float32(np.eye(8) + rng.normal(scale=0.05, size=(8, 8)))},
    clusters,
    turns=300,
    grad=(),
)
def codebook_of_moving_averages(p, inputs):
    """van den Oord et al. 2017, arXiv:1711.00937, appendix A.1."""
    z = inputs["x"] @ p["w"]
    book = inputs["m"] / inputs["n"][:, None]
    near = jnp.argmin(
        (z**2).sum(1)[:, None] - 2 * z @ book.T + (book**2).sum(1)[None], axis=1
    )
    one = jax.nn.one_hot(near, 8)
    n = 0.99 * inputs["n"] + 0.01 * one.sum(0)
    m = 0.99 * inputs["m"] + 0.01 * (one.T @ z)
    return {"x": inputs["x"], "m": m, "n": n}, m / n[:, None]


@row(
    weights(w=(8, 8)),
    both(normals(x=(32, 8)), constants(mean=np.zeros(8), var=np.ones(8))),
    turns=500,
)
def running_mean_and_variance(p, inputs):
    h = 0.1 * (inputs["x"] @ p["w"]) + 3.0
    mean = 0.999 * inputs["mean"] + 0.001 * h.mean(0)
    var = 0.999 * inputs["var"] + 0.001 * h.var(0)
    y = (h - mean[None]) / jnp.sqrt(var + 1e-5)[None]
    return {"x": inputs["x"], "mean": mean, "var": var}, y


@row(weights(w=(8, 8)), both(normals(x=(16, 8)), weights(t=(8, 8))), turns=300)
def target_network_that_follows(p, inputs):
    target = 0.995 * inputs["t"] + 0.005 * p["w"]
    q = jax.nn.relu(inputs["x"] @ target)
    return {"x": inputs["x"], "t": target}, q


@row(weights(w=(8, 1)), both(normals(x=(16, 8)), constants(b=0.0)), turns=500)
def baseline_of_a_policy_gradient(p, inputs):
    reward = 5.0 + (inputs["x"] @ p["w"])[:, 0]
    b = inputs["b"] + 0.002 * (reward.mean() - inputs["b"])
    return {"x": inputs["x"], "b": b}, (reward - b).mean()


@row(weights(w=(8, 8)), both(normals(x=(4, 8)), constants(n=np.zeros(8))), turns=600)
def counter_of_expert_tokens(p, inputs):
    gates = jax.nn.softmax(inputs["x"] @ p["w"])
    n = inputs["n"] + gates.sum(0)
    return {"x": inputs["x"], "n": n}, (gates @ (n / n.sum())).sum()


# Memory banks. Some rows are larger than f16 holds; nothing multiplies them.
def bank(rng):
    small, large = rng.normal(1.0, 0.1, (8, 8)), rng.normal(1e5, 1e4, (8, 8))
    return {"bank": np.float32(np.concatenate([small, large]))}


BANK = both(normals(x=(2, 8)), bank)


def others(inputs, outputs):
    return outputs["bank"][2:], inputs["bank"][2:]


@row(weights(w=(8, 8)), BANK, kept=others)
def bank_written_by_set(p, inputs):
    h = inputs["x"] @ p["w"]
    new = inputs["bank"].at[0].set(h[0])
    return {"bank": new, "scores": h @ new[:8].T}


@row(weights(w=(8, 8)), BANK, kept=others)
def bank_written_by_set_of_indices(p, inputs):
    h = inputs["x"] @ p["w"]
    new = inputs["bank"].at[jnp.array([1, 0])].set(h)
    return {"bank": new, "scores": h @ new[:8].T}


@row(weights(w=(8, 8)), BANK, kept=others)
def bank_written_by_add(p, inputs):
    h = inputs["x"] @ p["w"]
    new = inputs["bank"].at[0].add(h[0])
    return {"bank": new, "scores": h @ new[:8].T}


@row(weights(w=(8, 8)), BANK, kept=others)
def bank_written_by_dynamic_update_slice(p, inputs):
    h = inputs["x"] @ p["w"]
    new = jax.lax.dynamic_update_slice(inputs["bank"], h, (0, 0))
    return {"bank": new, "scores": h @ new[:8].T}


@row(weights(w=(8, 8)), BANK, kept=others)
def bank_written_by_where(p, inputs):
    h = inputs["x"] @ p["w"]
    here = (jnp.arange(16) == 0)[:, None]
    new = jnp.where(here, h[:1], inputs["bank"])
    return {"bank": new, "scores": h @ new[:8].T}


@row(
    weights(w=(8, 8)),
    BANK,
    kept=lambda inputs, outputs: (outputs["bank"][2:], inputs["bank"][:-2]),
)
def bank_that_is_a_queue(p, inputs):
    h = inputs["x"] @ p["w"]
    new = jnp.concatenate([h, inputs["bank"][:-2]])
    return {"bank": new, "scores": h @ new[:8].T}


@row(
    weights(w=(8, 8)),
    BANK,
    kept=lambda inputs, outputs: (outputs["bank"][2:], inputs["bank"][:-2]),
)
def bank_that_is_rolled(p, inputs):
    h = inputs["x"] @ p["w"]
    new = jnp.roll(inputs["bank"], 2, axis=0).at[:2].set(h)
    return {"bank": new, "scores": h @ new[:8].T}


@row(weights(w=(8, 8)), BANK, kept=others)
def bank_written_in_a_scan(p, inputs):
    def turn(bank, both):
        number, x = both
        h = x @ p["w"]
        bank = bank.at[number].set(h)
        return bank, h @ bank[:8].T

    new, scores = jax.lax.scan(turn, inputs["bank"], (jnp.arange(2), inputs["x"]))
    return {"bank": new, "scores": scores}


@row(weights(w=(8, 8)), BANK, kept=others)
def bank_written_in_a_branch(p, inputs):
    h = inputs["x"] @ p["w"]
    new = jax.lax.cond(
        h[0, 0] > -10.0,
        lambda bank: bank.at[0].set(h[0]),
        lambda bank: bank,
        inputs["bank"],
    )
    return {"bank": new, "scores": h @ new[:8].T}


@row(
    weights(w=(8, 8)),
    both(BANK, integers(8, at=())),
    kept=lambda inputs, outputs: (outputs["bank"][8:], inputs["bank"][8:]),
)
def replay_buffer(p, inputs):
    h = jnp.tanh(inputs["x"] @ p["w"])
    new = jax.lax.dynamic_update_index_in_dim(inputs["bank"], h[0], inputs["at"], 0)
    drawn = new[jnp.array([0, 3, 5])]
    return {"bank": new, "values": drawn @ p["w"]}


@row(weights(w=(8, 8), k=(8, 8)), BANK, kept=others)
def attention_over_a_cache(p, inputs):
    h = inputs["x"] @ p["w"]
    new = inputs["bank"].at[:2].set(inputs["x"] @ p["k"])
    chosen = jax.nn.softmax(h @ new[:8].T)
    return {"bank": new, "read": chosen @ new[:8]}


@row(weights(w=(8, 8), k=(8, 8)), both(normals(x=(4, 8), memory=(16, 8))), turns=100)
def memory_with_erase_and_add(p, inputs):
    """Graves et al. 2014, arXiv:1410.5401, section 3.2."""
    x, memory = inputs["x"], inputs["memory"]
    weight = jax.nn.softmax((x @ p["w"]) @ memory.T)
    written = jnp.tanh(x @ p["k"])
    erase = 0.002 * weight.mean(0)[:, None]
    memory = memory * (1 - erase) + 0.002 * (weight.T @ written)
    return {"x": x, "memory": memory}, weight @ memory
