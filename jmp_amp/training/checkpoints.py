"""From training with half-precision weights to checkpoints of any precision, and back.

A checkpoint of a mixed-precision run holds wrappers' states: masters, loss scales,
moments in 8 bits. The state of a plain float32 run of the same optimizer can be taken
out of it, and put into the state of another setup.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jmp_amp.policies.dtypes import F32, PyTree, floating_dtype, is_castable
from jmp_amp.training.half_weights import (
    DIGIT_STATES,
    WAYS,
    WEIGHT_STATES,
    warn_of_chain,
)
from jmp_amp.training.loss_scale_state import LossScaleState
from jmp_amp.training.low_precision_state import (
    CODES,
    LowPrecisionState,
    decoded,
    encoded_like,
    is_code,
)
from jmp_amp.training.rounding import stored
from jmp_amp.training.structures import (
    first_difference,
    is_half_parameter,
    is_overwritten,
    leaves_by_path,
    nodes_of,
    owned,
    rows_of,
)

Tree = TypeVar("Tree")

_WRAPPER_STATES = (LossScaleState, LowPrecisionState, *WEIGHT_STATES)


def export_params(
    params: Tree, opt_state: PyTree = None, dtype: DTypeLike = F32
) -> Tree:
    """Returns parameters in one dtype, f32 unless asked: for a checkpoint, or to serve.

    Half parameters are replaced by their masters (`with_master_weights`), or get their
    compensation added (`with_kahan`). Batch statistics and all other floats of the tree
    are cast too; integers, float64, complex numbers, keys and fp8 are not, nor is the
    collection `_overwrite_with_gradient` of flax's fp8 layers. Arrays are copied:
    `params` and `opt_state` may be donated afterwards.

    Args:
      params: a tree, variables or an `nnx.State`; or an nnx module.
      opt_state: the state of the optimizer, or anything that holds it, such as an
        `nnx.Optimizer` or a flax `TrainState`. It may have been made for `params` or
        for `params["params"]`.
      dtype: a floating dtype, or anything that `cast_floating` understands.

    Returns:
      A tree of the same structure; for a module a new one, the old one is left alone.

    Raises:
      TypeError: if `dtype` is not a floating dtype.
      ValueError: if the optimizer keeps a master of a parameter that is not there.

    Example:
      >>> import optax
      >>> import jmp_amp as amp
      >>> params = {"w": jnp.ones(2, jnp.bfloat16), "steps": 3}
      >>> tx = amp.with_master_weights(optax.sgd(1e-3))
      >>> grads = {"w": jnp.ones(2), "steps": 0}
      >>> updates, opt_state = tx.update(grads, tx.init(params), params)
      >>> amp.export_params(params, opt_state)
      {'steps': 3, 'w': Array([0.999, 0.999], dtype=float32)}
    """
    wanted = floating_dtype(dtype, "export_params(params, opt_state, {})")
    if isinstance(params, (*_WRAPPER_STATES, nnx.Optimizer)):
        fact = f"params is a {type(params).__name__}. Give the parameters first."
        raise TypeError(f"export_params(params, opt_state): {fact}")
    if isinstance(params, nnx.Module):
        graphdef, state = nnx.split(params)
        return nnx.merge(graphdef, export_params(state, opt_state, wanted))
    warn_of_chain(opt_state, "export_params(params, opt_state)")
    kept = {
        path: (type(node), leaf)
        for _, node in nodes_of(opt_state, DIGIT_STATES)
        for path, leaf in leaves_by_path(nnx.as_pure(node[1]))
    }
    exported = []
    for keys, leaf in jax.tree_util.tree_flatten_with_path(nnx.as_pure(params))[0]:
        path = jax.tree_util.keystr(keys)
        # The optimizer may have seen the collection `params` only.
        for at in (path, path.removeprefix("['params']")):
            if at not in kept or not is_half_parameter(keys, leaf):
                continue
            kind, digits = kept[at]
            if np.shape(digits) == leaf.shape:
                del kept[at]
                wide, digits = jnp.asarray(leaf, F32), jnp.asarray(digits)
                leaf = WAYS[kind][1](wide, digits, leaf.dtype)
        castable = is_castable(getattr(leaf, "dtype", None))
        if castable and not is_overwritten(keys):
            leaf = stored(leaf, wanted)
        exported.append(owned(leaf) if castable else leaf)
    if kept:
        path, (_, digits) = next(iter(kept.items()))
        fact = f"a half-precision parameter of shape {np.shape(digits)} at {path}"
        raise ValueError(
            f"export_params: the optimizer has {fact}, but there is none in this "
            f"{type(params).__name__}. Pass the tree that its init was given."
        )
    return jax.tree.structure(params).unflatten(exported)


def export_opt_state(opt_state: PyTree) -> PyTree:
    """Returns an optimizer's state without the wrappers of this library.

    The states of `with_loss_scale`, `with_master_weights`, `with_kahan`,
    `with_stochastic_rounding` and `with_low_precision_state` are replaced by the states
    that they wrap, at any depth; moments in bfloat16 or 8 bits are decoded to float32.
    With `export_params` this turns a checkpoint of mixed precision into one of float32.
    The loss scale is left out; `loss_scale_of` has it. Arrays are copied. (For trees of
    floats and complex numbers: for other leaves the wrappers keep no moments.)

    Example:
      >>> import optax
      >>> import jmp_amp as amp
      >>> tx = amp.with_loss_scale(optax.sgd(0.1, momentum=0.9), amp.no_loss_scale())
      >>> amp.export_opt_state(tx.init(jnp.zeros(2)))
      (TraceState(trace=Array([0., 0.], dtype=float32)), EmptyState())
    """

    def export(node: PyTree) -> PyTree:
        if _is_wrapper(node):
            return export_opt_state(node.inner_state)
        return decoded(node) if is_code(node) else owned(node)

    return jax.tree.map(export, opt_state, is_leaf=_is_node)


def import_opt_state(opt_state: Tree, exported: PyTree) -> Tree:
    """Returns `opt_state` with the moments, counts and schedules of another run.

    The inverse of `export_opt_state`: a float32 run goes on in mixed precision. Loss
    scale, counters and masters stay those of `opt_state`.

    Args:
      opt_state: a new state, `tx.init(params)`; for masters with all their digits `tx`
        has been given `init_from`.
      exported: the state of the same optimizer without the wrappers.

    Raises:
      ValueError: if the two are not states of one optimizer.

    Example:
      >>> import optax
      >>> import jmp_amp as amp
      >>> plain = optax.sgd(0.1, momentum=0.9)
      >>> _, trained = plain.update(jnp.ones(2), plain.init(jnp.zeros(2)))
      >>> tx = amp.with_loss_scale(plain, amp.dynamic_loss_scale())
      >>> amp.import_opt_state(tx.init(jnp.zeros(2)), trained).inner_state[0].trace
      Array([1., 1.], dtype=float32)
    """
    own = export_opt_state(opt_state)
    there, here = rows_of(exported, _type), rows_of(own, _type)
    if jax.tree.structure(own) != jax.tree.structure(exported) or here != there:
        raise ValueError(
            "import_opt_state: the state is not one of this optimizer; first "
            f"difference at {first_difference(there, here)}. Give the state of the "
            "optimizer that the wrappers are around (export_opt_state takes wrappers "
            "off), for the same parameters, with its moments in float32; restore a "
            "checkpoint with target=tx.init(params)."
        )
    return _filled(opt_state, iter(jax.tree.leaves(exported)))


def _type(leaf: Any) -> str:
    is_number = hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex)
    kind = jnp.result_type(leaf) if is_number else type(leaf).__name__
    return f"{kind}{list(np.shape(leaf))}"


def _filled(opt_state: PyTree, leaves: Iterator[PyTree]) -> PyTree:
    """Returns `opt_state` with all leaves but those of wrappers taken from `leaves`.

    Where it has a code, it has that of the leaf, rounded to nearest.
    """

    def fill(node: PyTree) -> PyTree:
        if _is_wrapper(node):
            return node._replace(inner_state=_filled(node.inner_state, leaves))
        leaf = next(leaves)
        return encoded_like(node, jnp.asarray(leaf)) if is_code(node) else owned(leaf)

    return jax.tree.map(fill, opt_state, is_leaf=_is_node)


def _is_wrapper(node: object) -> bool:
    return isinstance(node, _WRAPPER_STATES)


def _is_node(node: object) -> bool:
    return isinstance(node, (*_WRAPPER_STATES, *CODES))
