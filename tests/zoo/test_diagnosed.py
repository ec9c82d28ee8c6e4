"""`amp.diagnose` of every kind of model: it reports the numbers of the real program.

The other models are diagnosed in `tests/numerics/test_counts.py`. Expected values are
those of the compiled gradient of the autocast program, counted and compared by numpy.
"""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jmp_amp as amp
from tests import measures, zoo
from tests.programs import equations
from tests.zoo.language import llama
from tests.zoo.rules_models import custom_rules, unmarked
from tests.zoo.sequences import gcn, mamba
from tests.zoo.transformers import experts, towers
from tests.zoo.vision import ResNet, resnet, vae

POLICY = "mixed_bfloat16"
# XLA's simplifier changes what is rounded.
AS_WRITTEN = measures.EXACTLY_AS_WRITTEN | {"xla_disable_hlo_passes": "algsimp"}
# JAX < 0.11: the program and the diagnosed one round alike. Later compilers for a CPU
# fuse them otherwise, which turns single roundings.
ROUND_ALIKE = jax.__version_info__ < (0, 11)
NEAR = 1e-6 if ROUND_ALIKE else 2 * float(jnp.finfo(jnp.bfloat16).eps)
ERRORS = 1e-3 if ROUND_ALIKE else 0.25
PRODUCTS = ("dot_general", "conv_general_dilated")

# Diagnosed in `tests/numerics/test_counts.py`.
ELSEWHERE = {"mlp", "gpt_scan", "lstm"}
# They have the layers of CLIP, of ResNet and the VAE.
LIKE_OTHERS = {"transformer", "gpt", "encoder_decoder", "unet", "vit", "cnn"}
# What is marked runs in half in the reference too.
MARKED = {"custom_rules"}
CASES = {
    "llama": llama(32, 16, 2, 1, 1, 2, 8),
    "custom_rules": custom_rules(16, 1, 8, 16, amp.cast_inputs),
    "custom_rules_unmarked": custom_rules(16, 1, 8, 16, unmarked),
    "mamba": mamba(32, 8, 2, 1, 2, 8),
    "gcn": gcn(16, 2, 8, 32, 64),
    "moe": experts(32, 16, 2, 1, 4, 2, 8),
    "clip": towers(32, 4, 16, 2, 1, 4, 8, 8),
    "resnet": resnet(ResNet((8,), 1, nn.silu, nn.avg_pool), 4, 16, 16, 3),
    "vae": vae((8,), 4, 4, 8, 8, 3),
}


def test_every_model_of_the_zoo_is_diagnosed():
    assert CASES.keys() | ELSEWHERE | LIKE_OTHERS == set(zoo.MODELS)


@pytest.mark.slow
@pytest.mark.parametrize("model", CASES)
def test_a_diagnosis_has_the_numbers_of_the_program(model):
    loss = CASES[model].loss
    args = jax.jit(CASES[model].sample)(jax.random.key(0))
    planned = amp.autocast(loss, POLICY)
    d = amp.diagnose(loss, POLICY)(*args)

    program = jax.jit(jax.value_and_grad(planned), compiler_options=AS_WRITTEN)
    value, ours = program(*args)
    plain = jax.jit(jax.grad(loss)).trace(*args)
    exact = plain.lower().compile()(*args)
    np.testing.assert_allclose(d.value, value, rtol=NEAR)
    found = jax.tree_util.tree_leaves_with_path(ours)
    assert list(d.gradients) == [jax.tree_util.keystr(path) for path, _ in found]
    sizes = [np.linalg.norm(np.float64(x)) for x in jax.tree.leaves(exact)]
    for gradient, (path, x), y, size in zip(
        d.gradients.values(), found, jax.tree.leaves(exact), sizes, strict=True
    ):
        x, y = np.float64(x), np.float64(y)
        assert (gradient.size, gradient.nonfinite) == (x.size, 0)
        if size < 1e-5 * max(sizes):
            continue  # it is nothing but rounding
        assert gradient.amax == pytest.approx(abs(x).max(), rel=NEAR), path
        if ROUND_ALIKE:
            assert gradient.zeros == np.sum(x == 0), path
        if model not in MARKED:
            error = np.linalg.norm(x - y) / size
            assert gradient.error == pytest.approx(error, rel=ERRORS), path

    assert d.is_finite and not any(s.nonfinite for s in (*d.sites, *d.reference))
    assert (d.policy, d.loss_scale) == (amp.PolicyMap(POLICY), 1.0)
    for sites, fn in ((d.sites, planned), (d.reference, loss)):
        products = [s.dtype for s in sites if s.operation in PRODUCTS and s.is_forward]
        results = [m.result for m in measures.matmuls(fn, *args)]
        long = {"bf16": "bfloat16", "f32": "float32"}
        assert Counter(long[each] for each in products) == Counter(results)
    both = [s for s in d.reference if s.operation in PRODUCTS]
    names = [eqn.primitive.name for eqn in equations(plain.jaxpr)]
    assert len(both) == sum(name in PRODUCTS for name in names)
    assert all(s.error is not None for s in d.sites if s.is_forward)
