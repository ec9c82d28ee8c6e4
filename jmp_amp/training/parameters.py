"""Parameters in the dtypes of a policy, module by module, and in f32 again."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.core import Tracer

from jmp_amp.policies.arguments import checked_flag, warn
from jmp_amp.policies.dtypes import (
    F32,
    PyTree,
    is_castable,
    is_half,
    short_name,
)
from jmp_amp.policies.patterns import (
    Inside,
    ModuleInfo,
    inside_of,
    inside_of_tree,
    is_norm,
    matches,
)
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import (
    PolicyMap,
    as_policy_map,
    matching,
    matching_nearest,
    warn_of_unmatched,
)
from jmp_amp.training.rounding import stored
from jmp_amp.training.structures import (
    is_half_parameter,
    is_overwritten,
    is_variable,
    leaves_by_path,
)

Tree = TypeVar("Tree")

_LINEN_MODULES = {
    each.__name__: each
    for each in vars(nn).values()
    if isinstance(each, type) and issubclass(each, nn.Module)
}
# The name that linen gives to a module without one: `LayerNorm_0`.
_AUTOMATIC = re.compile(r"(?:Checkpoint|Scan|Vmap|Jit|Remat)*(\w+)_\d+")


def cast_params(
    params: Tree,
    policy: Policy | PolicyMap | str,
    *,
    model: nn.Module | nnx.Module | None = None,
    keep_norms: bool = True,
) -> Tree:
    """Returns parameters in the `param_dtype` of their modules' policies.

    The parameters of norm layers (`BatchNorm`, `LayerNorm`, `GroupNorm`, `RMSNorm`,
    ...) are float32, unless an entry of a `PolicyMap` names their class. Batch
    statistics, caches, random number streams and the `_overwrite_with_gradient` of
    flax's fp8 layers are not cast, nor are integers, float64 and fp8.

    In an nnx module norms are found by class, and so they are in an `nnx.State` if
    `model` is given. A linen tree has names only: a norm is called `LayerNorm_0` by
    linen, or holds a `scale` and no `kernel`; with `model`, modules that `setup` makes
    are found by class too. A `PolicyMap` finds modules by path in all of them, and
    single parameters: `"router/expert_bias"`, `"**/A_log"`.

    A finite number beyond the range of a half dtype becomes its largest, 65504 in
    float16. Infinities and NaNs stay.

    There is a warning if the policy stores f32, as "mixed_bfloat16" does, and no
    parameter is half: the call changes nothing then.

    Args:
      params: linen variables (`{"params": ..., "batch_stats": ...}`) or parameters; an
        `nnx.State`; or an nnx module.
      policy: a `Policy`, what `get_policy` understands, or a `PolicyMap`.
      model: the module that the parameters belong to.
      keep_norms: False casts the parameters of norm layers like all others.

    Returns:
      A tree of the same structure; for a module a new one, the old one is left alone.

    Raises:
      TypeError: if `params` is a linen module, `policy` not a policy, `model` not a
        module or `keep_norms` not a bool.
      ValueError: if a policy is unknown.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> from flax import linen as nn
      >>> model = nn.Sequential([nn.Dense(4), nn.LayerNorm(), nn.Dense(2)])
      >>> params = model.init(jax.random.key(0), jnp.ones((1, 3)))
      >>> params = amp.cast_params(params, "p=bf16,c=bf16,o=f32")
      >>> {name: leaf["bias"].dtype.name for name, leaf in params["params"].items()}
      {'layers_0': 'bfloat16', 'layers_1': 'float32', 'layers_2': 'bfloat16'}
      >>> policy = amp.PolicyMap("p=f16,c=f16,o=f32", {"**/A_log": "float32"})
      >>> amp.cast_params({"mix": {"A_log": jnp.ones(1), "D": jnp.ones(1)}}, policy)
      {'mix': {'A_log': Array([1.], dtype=float32), 'D': Array([1.], dtype=float16)}}
    """
    policies = as_policy_map(policy, "cast_params(params, {})")
    checked_flag(keep_norms, "cast_params(params, policy, keep_norms={})")
    if model is not None and not isinstance(model, nn.Module | nnx.Module):
        fact = f"model={model!r}): a {type(model).__name__} is no Flax module"
        remedy = "Give the module that the parameters belong to, or leave model out."
        raise TypeError(f"cast_params(params, policy, {fact}. {remedy}")
    if isinstance(params, nn.Module):
        fact = f"got a linen module, a {type(params).__name__}, without parameters"
        remedy = "Pass what its init returned, and the module as model=."
        raise TypeError(f"cast_params: {fact}. {remedy}")
    if isinstance(params, nnx.Module):
        graphdef, state, others = nnx.split(params, nnx.Param, ...)
        state = cast_params(state, policy, model=params, keep_norms=keep_norms)
        return nnx.merge(graphdef, state, others, copy=True)

    leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_variable)[0]
    # linen's variables hold a collection of parameters among others.
    is_collections = isinstance(params, Mapping) and "params" in params
    modules = _modules_in([_path(keys, is_collections) for keys, _ in leaves], policies)
    inside = inside_of_tree({name for path in modules for name in path[:1]})
    if model is not None:
        inside = inside_of(type(model).__name__)
        modules |= _modules_of(model, params if is_collections else {"params": params})
    dtype_of = _dtypes(modules, policies, keep_norms, inside)

    def leaf_in_its_dtype(keys: jax.tree_util.KeyPath, leaf: PyTree) -> PyTree:
        other = is_collections and str(getattr(keys[0], "key", "")) != "params"
        is_state = is_variable(leaf) and not isinstance(leaf, nnx.Param)
        if other or is_state or is_overwritten(keys):
            return leaf
        dtype = dtype_of(_path(keys, is_collections))
        return jax.tree.map(lambda leaf: stored(leaf, dtype), leaf)

    cast = jax.tree_util.tree_map_with_path(
        leaf_in_its_dtype, params, is_leaf=is_variable
    )
    remedy = 'For what nn.compact makes in linen, give a glob such as "**/head".'
    warn_of_unmatched(policies, f" {remedy}", stores=True)
    _warn_of_f32(policy, policies, params)
    return cast


def _warn_of_f32(given: object, policies: PolicyMap, params: PyTree) -> None:
    """Warns if no parameter is half or becomes so, though a policy computes in half.

    If it was written as text: a `Policy` may be one of several that a program takes.
    """
    dtypes = [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(params)]
    if not isinstance(given, str) or not dtypes or any(map(is_half, dtypes)):
        return
    chosen = [policies.default, *(each for _, each in policies.entries)]
    halves = [each.compute_dtype for each in chosen if is_half(each.compute_dtype)]
    if halves and not any(is_half(each.param_dtype) for each in chosen):
        half = short_name(halves[0])
        warn(
            f'cast_params(params, "{policies}"): the parameters of this policy are '
            f"{short_name(chosen[0].param_dtype)}, none is half. Write "
            f'"{half}", or "p={half},c={half},o=f32" for results in f32.'
        )


_Path = tuple[str, ...]
# The class of each module, or the nearest known base of it, and whether it is a norm.
_Modules = dict[_Path, tuple[type, bool]]
_UNKNOWN = nn.Module, False


def _dtypes(
    modules: _Modules, policies: PolicyMap, keep_norms: bool, inside: Inside
) -> Callable[[_Path], np.dtype]:
    """Returns the function from the path of a parameter to its dtype."""

    def info_of(path: _Path) -> ModuleInfo:
        cls, _ = modules.get(path, _UNKNOWN)
        return ModuleInfo(path, cls, path[-1] if path else None)

    entries, memory = policies.entries, policies._memory
    of_modules = {n for p in modules for n in matching(policies, info_of(p), inside)}
    # Text that matches no module may name a parameter.
    texts = {n for n, (pattern, _) in enumerate(entries) if not callable(pattern)}
    others = sorted(texts - of_modules)

    def dtype_of(path: _Path) -> np.dtype:
        module = path[:-1]
        around = [info_of(module[:n]).cls for n in range(len(module))]
        found = matching_nearest(policies, info_of(module), around, inside=inside)
        parameter = ModuleInfo(path, object, None)
        named = [n for n in others if matches(entries[n][0], parameter, inside)]
        memory.parameters.update(named)
        found += named
        entry = entries[found[-1]] if found else (None, policies.default)
        is_f32 = modules.get(module, _UNKNOWN)[1] and keep_norms
        return F32 if is_f32 and not is_norm(entry[0]) else entry[1].param_dtype

    return dtype_of


def _modules_in(paths: list[_Path], policies: PolicyMap) -> _Modules:
    """Returns the modules of a linen tree, recognised by the names of parameters."""
    held = {path[:end]: set() for path in paths for end in range(len(path))}
    for path in paths:
        held.setdefault(path[:-1], set()).add(path[-1] if path else "")
    named_types = {p.__name__: p for p, _ in policies.entries if isinstance(p, type)}
    classes = _LINEN_MODULES | named_types
    modules = {}
    for path, leaves in held.items():
        named = _AUTOMATIC.fullmatch(path[-1]) if path else None
        cls = classes.get(named[1], nn.Module) if named else nn.Module
        scales = "scale" in leaves and "kernel" not in leaves
        modules[path] = cls, is_norm(cls) or scales
    return modules


def _modules_of(
    model: nn.Module | nnx.Module, variables: PyTree | None = None
) -> _Modules:
    """Returns the modules that a model holds; in linen, those made by `setup`."""
    if isinstance(model, nnx.Module):
        found = {
            tuple(map(str, path)): type(node)
            for path, node in nnx.iter_graph(model)
            if isinstance(node, nnx.Module)
        }
    else:
        found = dict(_bound_modules(model.bind(variables or {})))
    return {path: (cls, is_norm(cls)) for path, cls in found.items()}


def _bound_modules(module: nn.Module) -> Iterator[tuple[tuple[str, ...], type]]:
    yield module.path, type(module)
    # Asking for any attribute runs `setup`, which makes the submodules.
    hasattr(module, "_")
    children = jax.tree.leaves(
        [value for name, value in vars(module).items() if name != "parent"],
        is_leaf=lambda value: isinstance(value, nn.Module),
    )
    for child in children:
        if isinstance(child, nn.Module) and child.scope is not None:
            yield from _bound_modules(child)


def _path(keys: jax.tree_util.KeyPath, is_collections: bool) -> tuple[str, ...]:
    names = [key.key for key in keys if isinstance(key, jax.tree_util.DictKey)]
    return tuple(map(str, names[is_collections:]))


def first_values(params: PyTree, init_from: PyTree, call: str) -> PyTree:
    """Returns `params` with its half leaves as new float32 arrays.

    With the digits of `init_from`, a tree (or nnx module) that they were cast from.

    Raises:
      ValueError: if a leaf is missing there, or rounds to another number.
    """
    given = nnx.state(init_from) if isinstance(init_from, nnx.Module) else init_from
    found = dict(leaves_by_path(nnx.as_pure(params if given is None else given)))
    leaves, structure = jax.tree.flatten(params)
    pure = jax.tree_util.tree_flatten_with_path(nnx.as_pure(params))[0]
    for index, (keys, leaf) in enumerate(pure):
        if is_half_parameter(keys, leaf):
            path = jax.tree_util.keystr(keys)
            original: Any = found.get(path)
            dtype = getattr(original, "dtype", None)
            there = "nothing" if dtype is None else jax.typeof(original)
            is_own = is_castable(dtype) and np.shape(original) == leaf.shape
            if is_own:
                leaves[index] = wide = new_float32(original, leaf)
                if original is not leaf and all(map(_is_at_hand, (wide, leaf))):
                    there, rounded = "another number", stored(wide, leaf.dtype)
                    is_own = jnp.array_equal(rounded, leaf, equal_nan=True)
            if not is_own:
                raise ValueError(
                    f"{call}(inner, init_from=...): the parameter at {path} is "
                    f"{jax.typeof(leaf)}, but there it is {there}. Give the tree that "
                    "the parameters were cast from."
                )
    return structure.unflatten(leaves)


def new_float32(original: PyTree, leaf: PyTree) -> jax.Array:
    """Returns a copy of `original`, with the sharding of `leaf`."""
    # An array that was put somewhere is committed to that place. A step that is given
    # one is compiled for it, and again if its result is not committed.
    if _is_at_hand(leaf) and leaf.committed and not isinstance(original, Tracer):
        original = jax.device_put(original, leaf.sharding)
    return jnp.array(original, F32, copy=True)


def _is_at_hand(array: PyTree) -> bool:
    is_known = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    return is_known and array.is_fully_addressable
