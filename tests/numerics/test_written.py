"""What a constant wrote, such as a mask's -1e9, is nothing that a program computes."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp
from tests.numerics.counting import of
from tests.numerics.made import diagnosis, site

ALLOWED = np.tri(8, dtype=bool)
X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((16, 16)).astype(np.float32)


def chosen(scores, fill):
    return jnp.where(ALLOWED, scores, fill)


def added(scores, fill):
    return scores + (1 - jnp.asarray(ALLOWED, scores.dtype)) * fill


def in_a_loop(scores, fill):
    def turn(row, allowed):
        return row, jnp.where(allowed[0], allowed[1], fill)

    return jax.lax.scan(turn, 0.0, (jnp.asarray(ALLOWED), scores))[1]


def attention(name, mask, fill, by=1.0):
    def fn(w, x):
        with jax.named_scope(name):
            weights = jax.nn.softmax(mask(by * x @ w @ x.T, fill))
        return jnp.mean(weights @ x)

    return fn


F32_MIN = float(jnp.finfo(jnp.float32).min)
# Those of a policy are one program.
MASKS = {
    "mixed_float16": [(chosen, -1e9), (chosen, F32_MIN), (added, -1e4)],
    "mixed_bfloat16": [(added, -1e9)],
    "float32": [(in_a_loop, -1e9)],
}


@pytest.mark.breadth(1)
@pytest.mark.parametrize("policy", MASKS)
def test_the_constant_of_a_mask_is_not_the_largest_value_of_its_module(policy):
    masks = {f"attention_{i}": each for i, each in enumerate(MASKS[policy])}
    fns = [attention(name, *each) for name, each in masks.items()]
    d = amp.diagnose(lambda w, x: sum(fn(w, x) for fn in fns), policy)(W, X)
    scores = np.abs(X.astype(np.float64) @ W @ X.T).max()
    for name, (_, fill) in masks.items():
        largest = max(site.amax for site in d.sites if site.module == name)
        assert largest >= 0.99 * min(-fill, 65504.0)
        # A softmax takes the largest score of a row from the others.
        assert 0.9 * scores < d.modules[name].amax < 2.5 * scores
        assert "(constant)" in d.drill_down(name)
    assert "amax: without constants of the program" in str(d)
    assert amp.Diagnosis.from_json(d.to_json()) == d


def test_a_large_value_beside_a_constant_is_shown():
    fn = attention("attention", chosen, -1e9, by=1600.0)
    d = amp.diagnose(lambda w, x: [fn(w, x)], "float32")(W, X)
    scores = 1600 * np.abs(X.astype(np.float64) @ W @ X.T).max()
    assert 0.9 * scores < d.modules["attention"].amax < 2.5 * scores


def test_what_is_computed_of_data_is_no_constant():
    def fn(x):
        x = jnp.minimum(x, 1e9)
        return x**2, jnp.exp(x), x @ x, x / 7.0

    d = amp.diagnose(fn, "float32")(np.full((2, 2), 80.0, np.float32))
    assert not any(site.is_constant for site in d.sites)
    assert "constants of the program" not in str(d)


def test_a_constant_that_is_computed_with_is_none_any_more_nor_in_the_backward_pass():
    def fn(x):
        return jnp.sum((x + 1e9) * 0.5) + jnp.sum(x * 1e9)

    d = amp.diagnose(fn, "float32")(np.ones(4, np.float32))
    assert [site.is_constant for site in of(d.sites, "add")[:1]] == [True]
    assert not any(site.is_constant for site in of(d.sites, "reduce_sum"))
    backward = [site for site in d.sites if not site.is_forward]
    assert any(site.amax == 1e9 for site in backward)
    assert not any(site.is_constant for site in backward)


def test_two_masks_that_are_added_write_their_sum():
    def fn(x):
        masks = [jnp.where(m, 0.0, -1e9) for m in (ALLOWED, ALLOWED.T)]
        return jnp.max(x + (masks[0] + masks[1] * 1.0 + masks[0]), axis=-1)

    d = amp.diagnose(fn, "float32")(jnp.ones((8, 8)))
    assert all(site.is_constant for site in of(d.sites, "add"))


def test_a_small_constant_is_a_value_as_any_other():
    d = amp.diagnose(lambda x: jnp.maximum(x, 4.0), "float32")(jnp.ones(4))
    assert d.modules[""].amax == 4.0


def test_the_map_of_a_plot_has_no_bar_of_a_constant():
    pytest.importorskip("matplotlib")
    values = [1.0, 2.0, *[1e9] * 8]
    masked = site(values, module="up", is_constant=True)
    shares = {}
    for made in (masked, dataclasses.replace(masked, is_constant=False)):
        figure = amp.plots.diagnose(diagnosis([made], [made]))
        figure.savefig(io.BytesIO(), format="png")
        (image,) = figure.axes[2].images
        first = round(image.get_extent()[0] + 0.5)
        row = np.square(image.get_array()[0])
        shares[made.is_constant] = {
            int(i) + first: float(row[i]) for i in np.flatnonzero(row)
        }
    assert shares[True] == pytest.approx({0: 0.5, 1: 0.5})
    assert shares[False] == pytest.approx({0: 0.1, 1: 0.1, 29: 0.8})
