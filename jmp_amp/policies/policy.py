"""Policies: which dtype parameters, computation and outputs have.

A `Policy` is plain, hashable data. Its text form, `p=f32,c=bf16,o=f32`, says all of it
and can be read back, so a policy can travel wherever text can: through a command line,
a configuration file or a JAX name scope.
"""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike

from jmp_amp.policies.arguments import type_name, written
from jmp_amp.policies.dtypes import (
    BF16,
    F32,
    advice,
    cast_leaf,
    floating_dtype,
    given_as_dtype,
    is_half,
    known_names,
    parse_dtype,
    reduce_dtype_of,
    short_name,
)
from jmp_amp.policies.fp8 import Fp8, fp8_from
from jmp_amp.policies.operation_names import operation_names, refuse_overlap
from jmp_amp.policies.saved_words import DefaultWord, checked_word, word_of

Tree = TypeVar("Tree")

_DTYPE_FIELDS = ("param_dtype", "compute_dtype", "output_dtype")
_CLASSES = ("low", "full", "follow")

_KEYS = {
    key: field
    for field, keys in {
        "param_dtype": "p param params param_dtype",
        "compute_dtype": "c compute compute_dtype",
        "output_dtype": "o output outputs output_dtype",
        "matmul": "m matmul",
        "saved": "s saved",
        "reduce_dtype": "r reduce reduce_dtype",
        **{name: name for name in _CLASSES},
    }.items()
    for key in keys.split()
}

_WORDS = ("mixed_bfloat16", "mixed_float16", "fp8")


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Policy:
    """The dtypes of parameters, computation and outputs.

    A policy is hashable and compares by value; it is not a pytree, so that it can be
    a static argument of `jax.jit`. `str(policy)` is text that `get_policy` reads back.

    Attributes:
      param_dtype: the dtype of stored parameters.
      compute_dtype: the dtype of matrix multiplications and convolutions.
      output_dtype: the dtype of floating results.
      low: names of operations to run in `compute_dtype`, whatever the built-in rules
        say: primitives, or functions (`"my_attention"`).
      full: names of operations to run in f32.
      follow: names of operations to run in the dtype that their inputs have.
      matmul: an `Fp8` for matrix products in 8-bit floats, of bf16 operands; None for
        products in `compute_dtype`.
      saved: which values are kept for the backward pass, and which are computed again.
        Matrix products, convolutions, sorts, lookups, collectives, random bits, linear
        algebra and loops never run twice. "all", "auto" and "least" have the same
        operations in the same order, and so the same values and gradients.

        * "all": every value that the derivatives read, as JAX does without a plan. The
          default where `compute_dtype` is f32.
        * "least": the least bytes. A minimum cut, in the dtypes of the plan, between
          what cannot be made again and what the backward pass reads.
        * "auto", the default where `compute_dtype` is half: the same inside of loops.
          In other code the inputs of matrix products are kept too, and chains of
          elementwise operations between them are computed again from values that are
          kept anyway. A barrier keeps XLA from merging the two computations where it
          pays: where the chain has a function that XLA computes once for all readers
          (`tanh`, `sin`, `pow`, ...), of 1.5 MiB or more.
      reduce_dtype: the dtype in which gradients of parameters are made and summed over
        devices: float32, or None for the dtype of the operation. (The gradient of what
        is broadcast, such as a bias, is summed in float32 anyway.) It holds for f32
        parameters, and for half ones under `value_and_grad` and `grad` of this package
        (`jax.grad` returns gradients in half, as its parameters). In float32 a
        matrix product of the backward pass reads half and writes float32, so what is
        reduced over devices is float32; weights are gathered in half as before. The
        gradient of a convolution's kernel is such a product on CPUs. On a GPU it is
        made in half and cast, and in float32 of operands that are cast where the
        arguments, or `jax.set_mesh`, tell that XLA partitions the batch over devices.

    Raises:
      TypeError: if a dtype is not a floating one, a name is not text, `matmul` is
        neither an `Fp8` nor None, or `saved` neither text nor None.
      ValueError: if a dtype is unknown, a name is in two classes, or is no identifier;
        if products are fp8 and `compute_dtype` is not bf16; if `saved` is none of the
        three words; if `reduce_dtype` is neither float32 nor None.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> policy = amp.Policy(compute_dtype=jnp.float16).with_full("my_loss")
      >>> print(policy)
      p=f32,c=f16,o=f32,full=my_loss
      >>> policy.cast_to_compute({"x": jnp.ones(2), "label": jnp.arange(2)})
      {'label': Array([0, 1], dtype=int32), 'x': Array([1., 1.], dtype=float16)}
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype
    output_dtype: np.dtype
    low: frozenset[str]
    full: frozenset[str]
    follow: frozenset[str]
    matmul: Fp8 | None
    saved: str
    reduce_dtype: np.dtype | None

    def __init__(
        self,
        param_dtype: DTypeLike = F32,
        compute_dtype: DTypeLike = BF16,
        output_dtype: DTypeLike = F32,
        *,
        low: Iterable[str] = (),
        full: Iterable[str] = (),
        follow: Iterable[str] = (),
        matmul: Fp8 | None = None,
        saved: str | None = None,
        reduce_dtype: DTypeLike | None = None,
    ):
        dtypes = (param_dtype, compute_dtype, output_dtype)
        for field, given in zip(_DTYPE_FIELDS, dtypes, strict=True):
            dtype = floating_dtype(given, f"Policy({field}={{}})")
            object.__setattr__(self, field, dtype)
        for field, given in zip(_CLASSES, (low, full, follow), strict=True):
            names = operation_names(given, f"Policy({field}=...)")
            object.__setattr__(self, field, names)
        refuse_overlap({name: getattr(self, name) for name in _CLASSES}, "Policy")
        _check_matmul(matmul, self.compute_dtype)
        object.__setattr__(self, "matmul", matmul)
        object.__setattr__(self, "saved", word_of(saved, self.compute_dtype))
        reduced = reduce_dtype_of(reduce_dtype, "Policy(reduce_dtype={})")
        object.__setattr__(self, "reduce_dtype", reduced)

    @property
    def says_saved(self) -> bool:
        """Whether `saved` differs from the default of the compute dtype."""
        return not isinstance(self.saved, DefaultWord)

    def cast_to_param(self, tree: Tree) -> Tree:
        """Returns `tree` with its floating leaves in `param_dtype`.

        See `cast_floating` for which leaves are cast.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> amp.get_policy("bf16").cast_to_param({"bias": jnp.zeros(2)})
          {'bias': Array([0, 0], dtype=bfloat16)}
        """
        return jax.tree.map(lambda leaf: cast_leaf(leaf, self.param_dtype), tree)

    def cast_to_compute(self, tree: Tree) -> Tree:
        """Returns `tree` with its floating leaves in `compute_dtype`.

        See `cast_floating` for which leaves are cast.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> amp.Policy().cast_to_compute((jnp.zeros(2), "relu"))
          (Array([0, 0], dtype=bfloat16), 'relu')
        """
        return jax.tree.map(lambda leaf: cast_leaf(leaf, self.compute_dtype), tree)

    def cast_to_output(self, tree: Tree) -> Tree:
        """Returns `tree` with its floating leaves in `output_dtype`.

        See `cast_floating` for which leaves are cast.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> amp.Policy().cast_to_output(jnp.zeros(2, jnp.bfloat16))
          Array([0., 0.], dtype=float32)
        """
        return jax.tree.map(lambda leaf: cast_leaf(leaf, self.output_dtype), tree)

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """Returns this policy with another `output_dtype`.

        Example:
          >>> import jmp_amp as amp
          >>> print(amp.Policy().with_output_dtype("bf16"))
          p=f32,c=bf16,o=bf16
        """
        dtype = floating_dtype(output_dtype, "Policy.with_output_dtype({})")
        return dataclasses.replace(self, output_dtype=dtype)

    def with_low(self, *names: str) -> "Policy":
        """Returns this policy with operations added that run in `compute_dtype`.

        Args:
          *names: of primitives (`"cumsum"`) or of Python functions (`"my_attention"`).

        Raises:
          ValueError: if a name already is in another class, or is no identifier.

        Example:
          >>> import jmp_amp as amp
          >>> print(amp.Policy().with_low("tanh", "dot"))
          p=f32,c=bf16,o=f32,low=dot+tanh
        """
        return self._with_names("low", names)

    def with_full(self, *names: str) -> "Policy":
        """Returns this policy with operations added that run in f32, see `with_low`.

        Example:
          >>> import jmp_amp as amp
          >>> print(amp.Policy().with_full("my_loss"))
          p=f32,c=bf16,o=f32,full=my_loss
        """
        return self._with_names("full", names)

    def with_follow(self, *names: str) -> "Policy":
        """Returns this policy with operations added that follow their inputs' dtype.

        Names and errors are those of `with_low`.

        Example:
          >>> import jmp_amp as amp
          >>> print(amp.Policy().with_follow("exp"))
          p=f32,c=bf16,o=f32,follow=exp
        """
        return self._with_names("follow", names)

    def _with_names(self, field: str, names: tuple[str, ...]) -> "Policy":
        written = ", ".join(map(repr, names))
        call = f"Policy.with_{field}({written})"
        classes = {name: getattr(self, name) for name in _CLASSES}
        classes[field] |= operation_names(names, call)
        refuse_overlap(classes, call)
        return dataclasses.replace(self, **classes)

    def _dtypes_and_names(self) -> tuple[dict[str, str], dict[str, list[str]]]:
        dtypes = {name: short_name(getattr(self, name)) for name in _DTYPE_FIELDS}
        names = {name: sorted(getattr(self, name)) for name in _CLASSES}
        return dtypes, {name: each for name, each in names.items() if each}

    def __str__(self) -> str:
        dtypes, names = self._dtypes_and_names()
        text = [f"{name[0]}={dtype}" for name, dtype in dtypes.items()]
        if self.matmul is not None:
            text.append(f"m={self.matmul}")
        if self.says_saved:
            text.append(f"s={self.saved}")
        if self.reduce_dtype is not None:
            text.append(f"r={short_name(self.reduce_dtype)}")
        return ",".join(text + [f"{n}={'+'.join(each)}" for n, each in names.items()])

    def __repr__(self) -> str:
        dtypes, names = self._dtypes_and_names()
        text = [f"{name}={each!r}" for name, each in (dtypes | names).items()]
        if self.matmul is not None:
            text.append(f"matmul={self.matmul!r}")
        if self.says_saved:
            text.append(f"saved={self.saved!r}")
        if self.reduce_dtype is not None:
            text.append(f"reduce_dtype={short_name(self.reduce_dtype)!r}")
        return f"Policy({', '.join(text)})"


def _check_matmul(matmul: object, compute_dtype: np.dtype) -> None:
    """Raises if products cannot be fp8 as `matmul` says."""
    if matmul is None:
        return
    if not isinstance(matmul, Fp8):
        raise TypeError(
            f"Policy(matmul={matmul!r}): neither an Fp8 nor None. Write "
            "matmul=amp.Fp8(), or the policy as text: "
            '"fp8", "p=f32,c=bf16,o=f32,m=fp8".'
        )
    if compute_dtype != BF16:
        # 448 * 448 * k leaves the range of f16 for k = 1 already.
        raise ValueError(
            f"Policy(compute_dtype={short_name(compute_dtype)}, matmul=Fp8(...)): "
            "products of fp8 are made of bf16 values and have bf16 results; f16 has "
            "no room for them. Use compute_dtype bf16."
        )


def get_policy(policy: str | Policy) -> Policy:
    """Returns the policy that a text describes.

    The forms are those of jmp (https://github.com/google-deepmind/jmp), two names of
    Keras, and one of Colossal-AI. Case and spaces do not matter.

    * `"p=f32,c=bf16,o=f32"`, or spelt out `"params=..,compute=..,output=.."`: a dtype
      that is left out is the one before it, and parameters are f32, so `"c=f16"` is
      `"p=f32,c=f16,o=f16"`. Operations are added as
      `"p=f32,c=bf16,o=f32,low=tanh+dot,full=my_loss"`, `saved` as `"c=f16,s=least"`,
      `reduce_dtype` as `"p=f32,c=bf16,r=f32"`.
    * a dtype alone, `"bf16"`, `"float32"`, `"full"`, `"half"`: parameters, computation
      and outputs have it. `"fp16"` is f16 throughout; the mixed precision that torch
      calls fp16 is `"mixed_float16"`, or `amp.recipe("fp16")`.
    * `"mixed_bfloat16"`, `"mixed_float16"`: f32 parameters and outputs.
    * `"fp8"`: `"mixed_bfloat16"` with matrix products in 8-bit floats, see `Fp8`. In
      pairs it is `"p=f32,c=bf16,o=f32,m=fp8"`; settings that are not the default are
      added as `"m=fp8+backward=e4m3+min_size=64"`.

    Args:
      policy: the text, or a `Policy`, which is returned as it is.

    Raises:
      ValueError: if the text is none of these; says which word is wrong.
      TypeError: if it is neither text nor a policy.

    Example:
      >>> import jmp_amp as amp
      >>> print(amp.get_policy("c=f16"))
      p=f32,c=f16,o=f16
      >>> amp.get_policy("mixed_bfloat16") == amp.Policy("f32", "bf16", "f32")
      True
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        found, remedy = type_name(policy), _FORMS
        if (dtype := given_as_dtype(policy)) is not None:
            found = f"the dtype {dtype.name}"
            remedy = f'Write "{short_name(dtype)}".'
            if is_half(dtype):
                remedy = (
                    f'Write "mixed_{dtype.name}", or "{short_name(dtype)}" for '
                    "parameters and outputs in it too."
                )
        raise TypeError(
            f"get_policy({written(policy)}): wanted a Policy or its text, got {found}. "
            f"{remedy}"
        )
    if "=" in policy:
        return _parse_pairs(policy)
    return _parse_word(policy)


_FORMS = (
    'Write "p=f32,c=bf16,o=f32", a dtype alone such as "bf16" or "float32" for all '
    'three, "mixed_bfloat16" or "mixed_float16". With products in fp8 it is "fp8".'
)


def _parse_word(text: str) -> Policy:
    word = text.strip().lower().replace("-", "_")
    if word == "fp8":
        return Policy(F32, BF16, F32, matmul=Fp8())
    if word in _WORDS:
        return Policy(F32, word.removeprefix("mixed_"), F32)
    if (dtype := parse_dtype(word)) is not None:
        return Policy(dtype, dtype, dtype)
    close = difflib.get_close_matches(word, [*_WORDS, *known_names()], n=1)
    hint = f'Did you mean "{close[0]}"? ' if close else ""
    raise ValueError(f'get_policy("{text}"): unknown policy {text!r}. {hint}{_FORMS}')


def _parse_pairs(text: str) -> Policy:
    call = f'get_policy("{text}")'
    dtypes: dict[str, np.dtype] = {}
    classes: dict[str, frozenset[str]] = {}
    matmuls: list[Fp8 | None] = []
    saved: str | None = None
    reduced: np.dtype | None = None
    seen: set[str] = set()
    for part in text.split(","):
        key, field, value = _pair(part, call)
        if field in seen:
            raise ValueError(
                f'{call}: "{key}=" sets {field} a second time. Set it once.'
            )
        seen.add(field)
        if field in _CLASSES:
            names = [name.strip() for name in value.split("+")]
            classes[field] = operation_names(names, f'{call}: "{key}="')
        elif field == "matmul":
            matmuls.append(fp8_from(value, f'{call}: "{key}="'))
        elif field == "saved":
            saved = checked_word(value, f'{call}: "{key}="')
        elif field == "reduce_dtype":
            # Text of a configuration may spell out the default.
            if value.lower() != "none":
                here = f"{call}: {key}=".replace("{", "{{").replace("}", "}}")
                reduced = reduce_dtype_of(value, here + "{}")
        elif (dtype := parse_dtype(value)) is not None:
            dtypes[field] = dtype
        else:
            raise ValueError(f'{call}: unknown dtype {value!r} at "{key}=". {advice()}')
    refuse_overlap(classes, call)
    if not dtypes:
        named = "fp8" if matmuls else "saved" if saved else "operations"
        named = named if reduced is None else "reduce_dtype"
        raise ValueError(
            f"{call}: {named} but no dtypes. Say which, for example "
            f'"p=f32,c=bf16,o=f32,{text.strip()}".'
        )
    param = dtypes.get("param_dtype", F32)
    compute = dtypes.get("compute_dtype", param)
    output = dtypes.get("output_dtype", compute)
    matmul = matmuls[0] if matmuls else None
    try:
        _check_matmul(matmul, compute)
    except ValueError as error:
        raise ValueError(f"{call}: {error}") from None
    return Policy(
        *(param, compute, output),
        matmul=matmul,
        saved=saved,
        reduce_dtype=reduced,
        low=classes.get("low", ()),
        full=classes.get("full", ()),
        follow=classes.get("follow", ()),
    )


def _pair(part: str, call: str) -> tuple[str, str, str]:
    """Returns the key of a part `key=value` as it is written, its field and value."""
    key, equals, value = (token.strip() for token in part.partition("="))
    field = _KEYS.get(key.lower())
    if not equals:
        raise ValueError(f"{call}: {key!r} is not of the form key=value. {_FORMS}")
    if field is None:
        raise ValueError(
            f"{call}: unknown key {key!r}. Use p (params), c (compute), "
            "o (output), low, full or follow. Products in fp8 are m (matmul), what "
            "the backward pass keeps is s (saved), what gradients are summed in over "
            "devices is r (reduce_dtype)."
        )
    return key, field, value
