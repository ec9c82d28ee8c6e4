"""How a GPT lies on a mesh of devices: layouts as data, and the model cut up by them.

The mesh has three axes, and a layout says how many devices lie along each:

    data     each of its devices has a part of the batch
    stage    each has some of the layers, one after the other (pipeline)
    tensor   each has some of the heads and some of the hidden features (Megatron)

Every dimension of every parameter has a name in DIMENSIONS, and a layout is a table of
names to axes, one for the parameters and one for the state of the optimizer. So FSDP is
`{"width": "data"}`, and layouts are put together with `|`.

Nothing here knows of precision.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from char_gpt import Block, Model, vocabulary
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Dimensions = Mapping[str, str | tuple[str, ...]]
AXES = ("data", "stage", "tensor")

# Of the parameters of `char_gpt.Model`. The vocabulary is cut nowhere: it has as many
# characters as the text happens to have.
DIMENSIONS = {
    "*embedding/embedding": ("token", "feature"),
    "position/embedding": ("position", "feature"),
    "layers/*/out/kernel": ("layer", "head", None, "width"),
    "layers/*/out/bias": ("layer", "width"),
    "layers/Multi*/kernel": ("layer", "width", "head", None),
    "layers/Multi*/bias": ("layer", "head", None),
    "layers/Dense_0/kernel": ("layer", "width", "hidden"),
    "layers/Dense_0/bias": ("layer", "hidden"),
    "layers/Dense_1/kernel": ("layer", "hidden", "width"),
    "layers/*": ("layer", "width"),
    "head/kernel": ("feature", "token"),
    "head/bias": ("token",),
    "LayerNorm_0/*": ("width",),
}


class Layout(NamedTuple):
    """Where everything lies.

    Attributes:
      mesh: how many devices lie along an axis, 1 where it is left out. 0 is as many as
        there are.
      parameters: the axes that a dimension of a parameter is cut over.
      state: the same for moments and masters; as the parameters where it is None.
    """

    mesh: Mapping[str, int]
    parameters: Dimensions = MappingProxyType({})
    state: Dimensions | None = None


FSDP: Dimensions = {"width": "data", "feature": "data"}
TENSOR: Dimensions = {"head": "tensor", "hidden": "tensor", "feature": "tensor"}
BOTH: Dimensions = TENSOR | FSDP | {"feature": ("tensor", "data")}
# Every stage has layers of its own and a part of all the rest.
STAGES: Dimensions = {"layer": "stage", "feature": "stage"}
ONE_DEVICE = "one device"
LAYOUTS = {
    ONE_DEVICE: Layout({}),
    "data": Layout({"data": 0}),
    "zero1": Layout({"data": 0}, state=FSDP),
    "fsdp": Layout({"data": 0}, FSDP),
    "tensor": Layout({"tensor": 0}, TENSOR),
    "pipeline": Layout({"stage": 0}, STAGES),
    "data_tensor": Layout({"data": 0, "tensor": 2}, TENSOR),
    "zero1_tensor": Layout({"data": 0, "tensor": 2}, TENSOR, BOTH),
    "fsdp_tensor": Layout({"data": 0, "tensor": 2}, BOTH),
    "pipeline_data": Layout({"data": 0, "stage": 4}, STAGES),
    "pipeline_zero1": Layout(
        {"data": 0, "stage": 4}, STAGES, STAGES | FSDP | {"feature": ("stage", "data")}
    ),
    "pipeline_data_tensor": Layout(
        {"data": 0, "stage": 2, "tensor": 2}, TENSOR | STAGES
    ),
}


def named(option: str, name: str, table: Mapping[str, Any]) -> Any:
    """Returns the entry of a table.

    Raises:
      ValueError: with the closest name that there is, if there is none of this name.
    """
    if name not in table:
        closest = difflib.get_close_matches(name, table, 1, 0)[0]
        raise ValueError(
            f"{option} {name}: there is none of this name. Did you mean {closest!r}? "
            f"There are {', '.join(table)}."
        )
    return table[name]


def layout_of(name: str) -> Layout:
    """Returns the layout of a name."""
    return named("--layout", name, LAYOUTS)


def mesh_of(name: str, devices: Sequence[Any]) -> Mesh:
    """Returns the mesh of a layout.

    Raises:
      ValueError: if it cannot be laid out on so many devices.
    """
    sizes = [layout_of(name).mesh.get(axis, 1) for axis in AXES]
    known = math.prod(size for size in sizes if size)
    left = len(devices) // known
    if left == 0 or (0 in sizes and len(devices) % known):
        raise ValueError(
            f"--layout {name}: {len(devices)} devices cannot be cut into groups of "
            f"{known}. Use --devices with a multiple of {known}."
        )
    shape = tuple(size or left for size in sizes)
    chosen = np.array(devices[: math.prod(shape)]).reshape(shape)
    return Mesh(chosen, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def specs_of(params: Any, dimensions: Dimensions) -> Any:
    """Returns the `PartitionSpec` of every parameter."""

    def spec(path: Any, _: Any) -> P:
        text = jax.tree_util.keystr(path, simple=True, separator="/")
        names = next(v for k, v in DIMENSIONS.items() if fnmatch.fnmatch(text, k))
        return P(*(dimensions.get(name) if name else None for name in names))

    return jax.tree_util.tree_map_with_path(spec, params)


def state_specs(opt_state: Any, specs: Any) -> Any:
    """Returns the `PartitionSpec` of all that an optimizer keeps.

    A leaf that belongs to a parameter has a path that ends as the parameter's. The rest
    are counts and the loss scale, which every device holds.
    """
    leaves = jax.tree_util.tree_leaves_with_path(specs)
    ends = {jax.tree_util.keystr(path): spec for path, spec in leaves}

    def spec(path: Any, leaf: Any) -> P:
        text = jax.tree_util.keystr(path)
        found = [spec for end, spec in ends.items() if text.endswith(end)]
        # `LayerNorm_0` is the end of a layer's norm too.
        return next((s for s in found if len(s) == leaf.ndim), P())

    return jax.tree_util.tree_map_with_path(spec, opt_state)


def only(spec: P, axes: Sequence[str]) -> P:
    """Returns `spec` without all axes but `axes`."""

    def kept(entry: Any) -> Any:
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in names if name in axes) or None

    return P(*map(kept, spec))


def placed(spec: Any, mesh: Mesh) -> Any:
    """Returns the shardings of a tree of specs."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), spec, is_leaf=lambda x: isinstance(x, P)
    )


def refuse_uneven(name: str, params: Any, specs: Any, mesh: Mesh) -> None:
    """Raises a ValueError if a parameter cannot be cut into equal parts."""

    def check(path: Any, leaf: Any, spec: P) -> None:
        for size, entry in zip(leaf.shape, spec, strict=True):
            axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
            parts = math.prod(mesh.shape[axis] for axis in axes)
            if size % parts:
                text = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(
                    f"--layout {name}: {text} has a dimension of {size}, which cannot "
                    f"be cut into {parts} equal parts. Use other --devices."
                )

    jax.tree_util.tree_map_with_path(check, params, specs)


def make_loss(
    model: Model, name: str, mesh: Mesh, pieces: int
) -> Callable[[Any, Any], jax.Array]:
    """Returns the loss of a batch, as a function of (params, batch).

    All layouts compute the loss of `model`. A layout only adds constraints on where
    arrays lie, and the pipeline if it has stages.

    Args:
      model: without dropout.
      name: of the layout.
      mesh: from `mesh_of`.
      pieces: how many micro-batches go through the stages of a pipeline.
    """
    block = Block(model.heads, 0.0, train=False)
    embedding = nn.Embed(len(vocabulary()), model.width)
    position = nn.Embed(model.context, model.width)
    head, norm = nn.Dense(len(vocabulary())), nn.LayerNorm()
    stages = mesh.shape["stage"]

    def gathered(params: Any, at: str) -> Any:
        """Some of the parameters, whole but for what is cut over the tensor axis.

        Both places are named so that the gradient is cut again before any other use.
        """
        lies = specs_of({at: params}, layout_of(name).parameters)[at]
        for axes in (AXES, ("tensor",)):
            params = jax.tree.map(
                lambda leaf, spec, axes=axes: lax.with_sharding_constraint(
                    leaf, only(P(*spec[len(spec) - leaf.ndim :]), axes)
                ),
                params,
                lies,
            )
        return params

    def rows(x: jax.Array) -> jax.Array:
        """Returns activations, cut along the batch alone."""
        return lax.with_sharding_constraint(x, P("data"))

    def embed(params: Any, tokens: jax.Array) -> jax.Array:
        each = {at: gathered(params[at], at) for at in ("embedding", "position")}
        x: Any = embedding.apply({"params": each["embedding"]}, tokens)
        positions = jnp.arange(tokens.shape[-1]).reshape(
            (1,) * (tokens.ndim - 1) + (-1,)
        )
        y: Any = position.apply({"params": each["position"]}, positions)
        return rows(x) + lax.with_sharding_constraint(y, P())

    @jax.checkpoint
    def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        # In here, so that the weights are gathered again for the backward pass.
        y: Any = block.apply({"params": gathered(params, "layers")}, x, None)
        return rows(y[0]), None

    def loss_of(params: Any, x: jax.Array, batch: Any) -> jax.Array:
        each = {at: gathered(params[at], at) for at in ("LayerNorm_0", "head")}
        normed: Any = norm.apply({"params": each["LayerNorm_0"]}, rows(x))
        logits: Any = head.apply({"params": each["head"]}, rows(normed))
        targets = batch["tokens"][:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.mean(losses * batch["weight"][:, None])

    def whole(params: Any, batch: Any) -> jax.Array:
        x = embed(params, batch["tokens"][:, :-1])
        x, _ = lax.scan(layer, x, params["layers"])
        return loss_of(params, x, batch)

    def staged(layers: Any, first: jax.Array, fed: jax.Array) -> jax.Array:
        """One stage of the pipeline, which has some of the layers.

        At every tick a stage runs one micro-batch through its layers and hands it on.
        Its input comes from the stage before, or from the embedding. The results before
        the first micro-batch arrives are not read.
        """
        stage = lax.axis_index("stage")

        def tick(arrived: jax.Array, piece: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = jnp.where(stage == 0, piece, arrived)
            x, _ = lax.scan(layer, x, layers)
            following = [(this, this + 1) for this in range(stages - 1)]
            return lax.ppermute(x, "stage", following), x

        _, done = lax.scan(tick, first[0], fed[0].swapaxes(0, 1))
        return done[stages - 1 :].swapaxes(0, 1)[None]

    def pipelined(params: Any, batch: Any) -> jax.Array:
        x = embed(params, batch["tokens"][:, :-1])

        def micro_batches(start: int, stop: int) -> jax.Array:
            """Some of them, for every stage. The first stage alone reads them."""
            # Every `pieces`-th row, so that each device along the data axis has some
            # of every micro-batch and none has to be moved.
            some = x.reshape(-1, pieces, *x.shape[1:])[:, start:stop]
            return jnp.broadcast_to(some[None], (stages, *some.shape))

        last = [micro_batches(pieces - 1, pieces) for _ in range(stages - 1)]
        fed = jnp.concatenate([micro_batches(0, pieces), *last], axis=2)
        # Manual along the stages alone: the other axes are those of `jit`.
        through = jax.shard_map(
            staged,
            mesh=mesh,
            in_specs=(P("stage"), P("stage"), P("stage")),
            out_specs=P("stage"),
            axis_names={"stage"},
        )
        done = through(params["layers"], micro_batches(0, 1)[:, :, 0], fed)[-1]
        return loss_of(params, done.reshape(x.shape), batch)

    return whole if stages == 1 else pipelined
