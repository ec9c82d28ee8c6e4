"""Policies: which dtype parameters, computation and outputs have.

A `Policy` is plain, hashable data. Its text form, `p=f32,c=bf16,o=f32`, says all of it
and can be read back, so a policy can travel wherever text can: through a command line,
a configuration file or a JAX name scope.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jmp_amp.policies.arguments import quoting, type_name, written
from jmp_amp.policies.dtypes import (
    BF16,
    F32,
    NAMES,
    Tree,
    advice,
    cast_leaf,
    floating_dtype,
    given_as_dtype,
    is_half,
    parse_dtype,
    short_name,
)
from jmp_amp.policies.fp8 import GONE, Fp8

# Why a word of `Policy.saved` is gone, and what to write.
_GONE = dict.fromkeys(
    ("int8", "e4m3"),
    'on an H200 residuals in 8 bits needed more time and memory than "all". Use '
    '"least", the fewest bytes',
)

_DTYPE_FIELDS = ("param_dtype", "compute_dtype", "output_dtype")
_CLASSES = ("low", "full", "follow")
_KEYS = {
    key: field
    for field, keys in {
        "param_dtype": "p param params",
        "compute_dtype": "c compute",
        "output_dtype": "o output outputs",
        "matmul": "m",
        "saved": "s",
        "reduce_dtype": "r reduce",
        **dict.fromkeys(_CLASSES, ""),
    }.items()
    for key in (field, *keys.split())
}
_WORDS = ("mixed_bfloat16", "mixed_float16", "fp8")


class DefaultWord(str):
    """A word of `Policy.saved` that is the default of the compute dtype.

    `dataclasses.replace(policy, compute_dtype=...)` gives it again, and so the new
    policy has the default of the other dtype.
    """

    __slots__ = ()


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
        given = dict(zip(_DTYPE_FIELDS, dtypes, strict=True))
        fields: dict[str, Any] = {
            field: floating_dtype(dtype, f"Policy({field}={{}})")
            for field, dtype in given.items()
        }
        fields |= _operation_names(low=low, full=full, follow=follow)
        compute = fields["compute_dtype"]
        fields["matmul"] = _checked_matmul(matmul, compute)
        fields["saved"] = _saved_word(saved, is_half(compute))
        fields["reduce_dtype"] = _checked_reduce_dtype(reduce_dtype)
        for field, value in fields.items():
            object.__setattr__(self, field, value)

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

    def with_output_dtype(self, output_dtype: DTypeLike) -> Policy:
        """Returns this policy with another `output_dtype`.

        Example:
          >>> import jmp_amp as amp
          >>> print(amp.Policy().with_output_dtype("bf16"))
          p=f32,c=bf16,o=bf16
        """
        dtype = floating_dtype(output_dtype, "Policy.with_output_dtype({})")
        return dataclasses.replace(self, output_dtype=dtype)

    def with_low(self, *names: str) -> Policy:
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

    def with_full(self, *names: str) -> Policy:
        """Returns this policy with operations added that run in f32, see `with_low`.

        Example:
          >>> import jmp_amp as amp
          >>> print(amp.Policy().with_full("my_loss"))
          p=f32,c=bf16,o=f32,full=my_loss
        """
        return self._with_names("full", names)

    def with_follow(self, *names: str) -> Policy:
        """Returns this policy with operations added that follow their inputs' dtype.

        Names and errors are those of `with_low`.

        Example:
          >>> import jmp_amp as amp
          >>> print(amp.Policy().with_follow("exp"))
          p=f32,c=bf16,o=f32,follow=exp
        """
        return self._with_names("follow", names)

    def _with_names(self, field: str, names: tuple[str, ...]) -> Policy:
        with quoting(f"Policy.with_{field}({', '.join(map(repr, names))})"):
            return dataclasses.replace(self, **{field: (*getattr(self, field), *names)})

    def _said(self) -> dict[str, Any]:
        """Returns what the text of the policy has: the dtypes, and what is no default.

        Dtypes are their short names, operations are sorted.
        """
        others = {
            "matmul": self.matmul,
            "saved": self.saved if self.says_saved else None,
            "reduce_dtype": self.reduce_dtype and short_name(self.reduce_dtype),
            **{name: sorted(getattr(self, name)) for name in _CLASSES},
        }
        dtypes = {name: short_name(getattr(self, name)) for name in _DTYPE_FIELDS}
        return dtypes | {name: value for name, value in others.items() if value}

    def __str__(self) -> str:
        return ",".join(
            f"{name}={'+'.join(value)}" if name in _CLASSES else f"{name[0]}={value}"
            for name, value in self._said().items()
        )

    def __repr__(self) -> str:
        said = [f"{name}={value!r}" for name, value in self._said().items()]
        return f"Policy({', '.join(said)})"


def _operation_names(**classes: Iterable[str]) -> dict[str, frozenset[str]]:
    """Returns the names of operations in each class, as identifiers."""
    found = {}
    for field, given in classes.items():
        is_many = isinstance(given, Iterable) and not isinstance(given, str)
        names: list[Any] = list(given) if is_many else [given]
        for name in names:
            if not is_many or not isinstance(name, str):
                raise TypeError(
                    f"Policy({field}=...): {name!r} is no collection of names. Use a "
                    'set of strings, like {"tanh", "my_loss"}.'
                )
            if not name.replace("-", "_").isidentifier():
                raise ValueError(
                    f"Policy({field}=...): {name!r} is not the name of an operation. "
                    "Use the bare name of a primitive or a Python function, like "
                    '"tanh" or "my_loss".'
                )
        # JAX calls its primitives scatter-add, scatter-max, ...
        found[field] = frozenset(name.replace("-", "_") for name in names)
    for (first, names), (second, others) in itertools.combinations(found.items(), 2):
        for name in sorted(names & others):
            raise ValueError(
                f"Policy: {name!r} is both in {first} and in {second}. An operation "
                "has one class: name it in one of them only."
            )
    return found


def _checked_matmul(matmul: Fp8 | None, compute_dtype: np.dtype) -> Fp8 | None:
    if matmul is not None and not isinstance(matmul, Fp8):
        raise TypeError(
            f"Policy(matmul={matmul!r}): neither an Fp8 nor None. Write "
            "matmul=amp.Fp8(), or the policy as text: "
            '"fp8", "p=f32,c=bf16,o=f32,m=fp8".'
        )
    if matmul is not None and compute_dtype != BF16:
        # 448 * 448 * k leaves the range of f16 for k = 1 already.
        raise ValueError(
            f"Policy(compute_dtype={short_name(compute_dtype)}, matmul=Fp8(...)): "
            "products of fp8 are made of bf16 values and have bf16 results; f16 has "
            "no room for them. Use compute_dtype bf16."
        )
    return matmul


def _saved_word(saved: str | None, is_half: bool) -> str:
    """Returns the word of a policy, in any case; of the default, a `DefaultWord`."""
    default = DefaultWord("auto" if is_half else "all")
    if saved is None or isinstance(saved, DefaultWord):
        return default
    call, remedy = f"Policy(saved={saved!r})", 'Use "all", "auto" or "least"'
    if not isinstance(saved, str):
        raise TypeError(f"{call}: {saved!r} is neither text nor None. {remedy}.")
    word = saved.strip().lower()
    if word in ("int8", "e4m3"):
        raise ValueError(f"{call}: {word!r} is gone: {_GONE[word]}.")
    if word not in ("all", "auto", "least"):
        raise ValueError(
            f"{call}: unknown word {saved!r}. {remedy}: what the backward pass keeps."
        )
    return default if word == default else word


def _checked_reduce_dtype(given: DTypeLike | None) -> np.dtype | None:
    if given is None:
        return None
    remedy = (
        "Gradients are made and summed in float32, or in the dtype of the operation "
        'that makes them. Use "float32", or None for the latter.'
    )
    dtype = floating_dtype(given, "Policy(reduce_dtype={})", remedy)
    if dtype != F32:
        raise ValueError(f"Policy(reduce_dtype={given!r}): {remedy}")
    return dtype


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
            found, remedy = f"the dtype {dtype.name}", f'Write "{short_name(dtype)}".'
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
    word = policy.strip().lower().replace("-", "_")
    if word in _WORDS:
        half = BF16 if word == "fp8" else word.removeprefix("mixed_")
        return Policy(F32, half, F32, matmul=Fp8() if word == "fp8" else None)
    if (dtype := parse_dtype(word)) is not None:
        return Policy(dtype, dtype, dtype)
    close = difflib.get_close_matches(word, [*_WORDS, *NAMES], n=1)
    hint = f'Did you mean "{close[0]}"? ' if close else ""
    fact = f"unknown policy {policy!r}. {hint}{_FORMS}"
    raise ValueError(f'get_policy("{policy}"): {fact}')


_FORMS = (
    'Write "p=f32,c=bf16,o=f32", a dtype alone such as "bf16" or "float32" for all '
    'three, "mixed_bfloat16" or "mixed_float16". With products in fp8 it is "fp8". Of '
    'a recipe such as amp.recipe("O1") take recipe.autocast(fn), or recipe.policy.'
)


def _parse_pairs(text: str) -> Policy:
    call = f'get_policy("{text}")'
    given: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (token.strip() for token in part.partition("="))
        field = _KEYS.get(key.lower())
        if not equals:
            raise ValueError(f"{call}: {key!r} is not of the form key=value. {_FORMS}")
        if field is None:
            raise ValueError(
                f"{call}: unknown key {key!r}. Use p (params), c (compute), "
                "o (output), low, full or follow. Products in fp8 are m (matmul), what "
                "the backward pass keeps is s (saved), what gradients are summed in "
                "over devices is r (reduce_dtype)."
            )
        if field in given:
            fact = f'"{key}=" sets {field} a second time. Set it once.'
            raise ValueError(f"{call}: {fact}")
        if field in _DTYPE_FIELDS and parse_dtype(value) is None:
            raise ValueError(f'{call}: unknown dtype {value!r} at "{key}=". {advice()}')
        names = [name.strip() for name in value.split("+")]
        given[field] = names if field in _CLASSES else value
    if not given.keys() & set(_DTYPE_FIELDS):
        raise ValueError(
            f"{call}: {', '.join(given)} but no dtypes. Say which, for example "
            f'"p=f32,c=bf16,o=f32,{text.strip()}".'
        )
    # A dtype that is left out is the one before it.
    for field, before in zip(_DTYPE_FIELDS, ("", *_DTYPE_FIELDS), strict=False):
        given.setdefault(field, given.get(before, F32))
    # Text of a configuration may spell out the default.
    if given.get("reduce_dtype", "").lower() == "none":
        del given["reduce_dtype"]
    try:
        given["matmul"] = _fp8_from(given.get("matmul", "none"))
        return Policy(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{call}: {error}") from None


def _fp8_from(text: str) -> Fp8 | None:
    """Returns what `str(Fp8(...))` wrote; None for "none"."""
    name, *settings = (part.strip() for part in text.lower().split("+"))
    if name == "none" and not settings:
        return None
    if name != "fp8":
        raise ValueError(
            f"unknown kind of product {name!r}. Use fp8, with settings such as "
            "fp8+backward=e4m3, or none."
        )
    fields = [field.name for field in dataclasses.fields(Fp8)]
    found: dict[str, Any] = {}
    for setting in settings:
        key, _, value = (token.strip() for token in setting.partition("="))
        if key in GONE:
            raise ValueError(f"{key!r} of fp8 is gone: {GONE[key]}.")
        if key not in fields or key in found:
            fact = "set twice" if key in found else "unknown"
            known = ", ".join(fields)
            raise ValueError(f"{key!r} of fp8 is {fact}. Set each once of {known}.")
        number = int(value) if value.isdecimal() else value
        found[key] = {"true": True, "false": False}.get(value, number)
    return Fp8(**found)
