"""Policies by module: which `Policy` a Flax module has, by its class or its path.

A `PolicyMap` is plain, hashable data, as a `Policy` is. It stands wherever a policy
does; a policy alone is the map without entries.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from flax import linen as nn

from jmp_amp.policies.arguments import holds_arrays, quoting, warn, written
from jmp_amp.policies.dtypes import is_castable
from jmp_amp.policies.patterns import (
    Inside,
    ModuleInfo,
    Pattern,
    advice_on,
    checked_pattern,
    describe,
    is_optional,
    matches,
    matches_names,
    pattern_from,
    text_of,
)
from jmp_amp.policies.policy import Policy, get_policy


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class PolicyMap:
    r"""Policies by Flax module, linen and nnx, for whatever takes a policy.

    Among the entries that match a module the latest wins. A module that no entry
    matches has the policy of the module that calls it; a module's own match beats what
    is passed down to it, whatever the order.

    A pattern is one of

    * a module class: it matches its instances and those of its subclasses;
    * a glob of the whole path, `"encoder/layers_*/attn"`: `*` and `?` and `[0-3]` stay
      inside one name, `**` stands for any number of names, so that `"**/head"` matches
      a `head` at the top too, and `"encoder/**"` the encoder and all that is in it;
      `""` is the outermost module; a path as a report prints it, with the outermost
      module in front, `"Encoder/layers_0/attn"`, is understood too;
    * a `re.Pattern`, which has to match the whole path, `blocks/0/attn`;
    * a function of a `ModuleInfo` that returns whether it matches.

    In `cast_params` a glob or regular expression that matches no module may name a
    parameter, after the path of its module: `"router/expert_bias"`, `"**/A_log"`. Its
    policy beats that of the module. A computation warns that it ignores the entry.

    Globs and regular expressions match named scopes too, where no Flax module runs:
    what `jax.named_scope` names, and the layers of libraries that open such scopes, as
    Haiku and Keras do. Inside of a Flax module they are for modules alone.

    A norm layer (`BatchNorm`, `LayerNorm`, `GroupNorm`, `RMSNorm`, ...) computes in f32
    and hands on the compute dtype of the policy that reaches it. An entry for a norm
    class itself is taken as it is written.

    A map warns once of each entry that matches no module and no scope of a program.
    Entries that a recipe adds, for modules that a model may lack, are exempt.

    Its text, `"mixed_bfloat16; **/head: float32; re:blocks/\d+: float32"`, is what
    `str` returns and what every `policy` argument accepts.

    A map is hashable, compares by value and is not a pytree.

    Attributes:
      default: the policy of everything else.
      entries: pairs of a pattern and a `Policy`, the last one strongest.

    Args:
      default: a `Policy` or what `get_policy` understands.
      entries: patterns and their policies, a mapping or pairs; a policy is a `Policy`
        or what `get_policy` understands.

    Raises:
      TypeError: if a pattern is none of these, or a value is no policy.
      ValueError: if a glob cannot match, a pattern is there twice, or a policy is
        unknown or computes in a dtype other than float16, bfloat16 and float32.

    Source: the idea is that of `keras.DTypePolicyMap`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> from flax import linen as nn
      >>> policy = amp.PolicyMap("mixed_bfloat16", {"**/layers_1": "float32"})
      >>> model = nn.Sequential([nn.Dense(8), nn.Dense(4)])
      >>> x = jnp.ones((2, 8))
      >>> params = model.init(jax.random.key(0), x)
      >>> report = amp.explain(model.apply, policy)(params, x)
      >>> [e.dtype for e in report.equations if e.matmuls]
      ['bf16', 'f32']
    """

    default: Policy
    entries: tuple[tuple[Pattern, Policy], ...]

    def __init__(
        self,
        default: Policy | str = "mixed_bfloat16",
        entries: Mapping[Any, Policy | str]
        | Iterable[tuple[Pattern, Policy | str]] = (),
    ):
        pairs = entries.items() if isinstance(entries, Mapping) else entries
        if not isinstance(pairs, Iterable) or isinstance(pairs, str):
            raise TypeError(
                f"PolicyMap(default, {entries!r}): wanted a dictionary from patterns "
                'to policies, such as {"**/head": "float32"}.'
            )
        checked: dict[Pattern, Policy] = {}
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(
                    f"PolicyMap: {pair!r} is no entry. Give a dictionary from patterns "
                    'to policies, such as {"**/head": "float32"}.'
                )
            pattern = checked_pattern(pair[0])
            name = describe(pattern)
            if pattern in checked:
                fact = "is there twice. Give it one policy."
                raise ValueError(f"PolicyMap: the pattern {name} {fact}")
            checked[pattern] = _computable(pair[1], f"PolicyMap(..., {{{name}: {{}}}})")
        policy = _computable(default, "PolicyMap(default={})")
        object.__setattr__(self, "default", policy)
        object.__setattr__(self, "entries", tuple(checked.items()))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        # Without the cached properties: hashes of text differ between processes.
        return PolicyMap, (self.default, self.entries)

    @functools.cached_property
    def sees_paths(self) -> bool:
        """Whether an entry can distinguish two modules of one class."""
        return any(not isinstance(pattern, type) for pattern, _ in self.entries)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # It is part of the key of JAX's caches, and asked for at every traced call.
        return hash((self.default, self.entries))

    @functools.cached_property
    def _memory(self) -> _Memory:
        return _Memory(set(), set(), {}, set(), set())

    def match(self, info: ModuleInfo) -> tuple[Pattern, Policy] | None:
        """Returns the latest entry that matches a module, or None.

        Example:
          >>> import jmp_amp as amp
          >>> policies = amp.PolicyMap("bf16", {"**/head": "float32"})
          >>> pattern, policy = policies.match(
          ...     amp.ModuleInfo(("gpt", "head"), object, "head")
          ... )
          >>> print(pattern, policy)
          **/head p=f32,c=f32,o=f32
        """
        found = matching(self, info)
        return self.entries[found[-1]] if found else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the map as text in dictionaries, for JSON and YAML.

        A `re.Pattern` is written as `"re:..."`. The order of the entries means
        something: do not sort the keys.

        Raises:
          ValueError: if a pattern is a class or a function, which no text can say.

        Example:
          >>> import jmp_amp as amp
          >>> policies = amp.PolicyMap("mixed_bfloat16", {"**/head": "float32"})
          >>> policies.to_dict()
          {'default': 'p=f32,c=bf16,o=f32',
           'policies': {'**/head': 'p=f32,c=f32,o=f32'}}
          >>> amp.PolicyMap.from_dict(policies.to_dict()) == policies
          True
        """
        policies = {}
        for pattern, policy in self.entries:
            text = text_of(pattern)
            if text is None:
                raise ValueError(
                    f"PolicyMap.to_dict(): {describe(pattern)} is no text. Write the "
                    'entry as a glob such as "**/head", or as a re.Pattern.'
                )
            policies[text] = str(policy)
        return {"default": str(self.default), "policies": policies}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PolicyMap:
        """Returns the map that `to_dict` wrote.

        Raises:
          TypeError: if `data` is not of that form.
          ValueError: if a key is unknown, or a pattern or a policy is wrong.
        """
        wanted = (
            f"PolicyMap.from_dict({data!r}): wanted a dictionary such as "
            '{"default": "mixed_bfloat16", "policies": {"**/head": "float32"}}'
        )
        policies = data.get("policies", {}) if isinstance(data, Mapping) else None
        if not isinstance(policies, Mapping):
            raise TypeError(f"{wanted}.")
        if wrong := (set(data) - {"policies"}) ^ {"default"}:
            named = ", ".join(sorted(map(repr, wrong)))
            raise ValueError(f"{wanted}. The key {named} is unknown or missing.")
        entries = [(pattern_from(text), each) for text, each in policies.items()]
        return cls(data["default"], entries)

    def __str__(self) -> str:
        parts = [str(self.default)]
        for pattern, policy in self.entries:
            text = text_of(pattern)
            named = f"<{describe(pattern)}>" if text is None else text
            parts.append(f"{named}: {policy}")
        return "; ".join(parts)

    def __repr__(self) -> str:
        entries = [f"{describe(p)}: {str(each)!r}" for p, each in self.entries]
        return f"PolicyMap({str(self.default)!r}, {{{', '.join(entries)}}})"


def as_policy_map(policy: object, call: str) -> PolicyMap:
    """Returns a policy, its text, or a map of policies as a map; raises if it is none.

    Args:
      policy: the argument of the caller.
      call: the caller's call as written, with `{}` for the policy, for the error.
    """
    if isinstance(policy, PolicyMap):
        return policy
    if not isinstance(policy, str) or ";" not in policy:
        return PolicyMap(_computable(policy, call))
    call = call.replace("{}", repr(policy))
    default, *entries = (part.strip() for part in policy.split(";"))
    pairs = []
    for entry in filter(None, entries):
        pattern, colon, text = (token.strip() for token in entry.rpartition(":"))
        if not colon:
            commas = policy.replace(";", ",").replace(" ", "")
            remedy = f"{commas!r} if it is one policy, or " if "=" in entry else ""
            raise ValueError(
                f"{call}: {entry!r} is not of the form pattern: policy. Write {remedy}"
                '"mixed_bfloat16; **/head: float32".'
            )
        pairs.append((pattern, text))
    with quoting(call):
        return PolicyMap(default, [(pattern_from(name), each) for name, each in pairs])


def matching(
    policies: PolicyMap, info: ModuleInfo, inside: Inside | None = None
) -> list[int]:
    """Returns the numbers of the entries that match a module, the strongest last.

    `inside` reads globs that begin with the outermost module, as reports print paths.
    """
    found = _numbers(policies, lambda pattern: matches(pattern, info, inside))
    policies._memory.seen[info.path] = info.cls
    return found


def _numbers(policies: PolicyMap, is_match: Callable[[Pattern], bool]) -> list[int]:
    found = [n for n, (each, _) in enumerate(policies.entries) if is_match(each)]
    policies._memory.matched.update(found)
    return found


def matching_nearest(
    policies: PolicyMap,
    info: ModuleInfo,
    around: Sequence[type] = (),
    start: int = 0,
    inside: Inside | None = None,
) -> list[int]:
    """Returns the numbers of the entries of a module and of the modules around it.

    `around` are the classes of these modules, the outermost first, as far as they are
    known. The first `start` of them are left out.
    """
    found = []
    for end in range(start, len(info.path)):
        cls = around[end] if end < len(around) else nn.Module
        name = info.path[end - 1] if end else None
        found += matching(policies, ModuleInfo(info.path[:end], cls, name), inside)
    return found + matching(policies, info, inside)


def entries_of_scopes(
    policies: PolicyMap, scopes: Iterable[tuple[str, ...]]
) -> tuple[tuple[Pattern, Policy], ...]:
    """Returns the entries that match name scopes; `scopes` are the names of each."""
    names = set(scopes if policies.entries else ())
    found = _numbers(policies, lambda p: any(matches_names(p, each) for each in names))
    return tuple(policies.entries[number] for number in found)


def unmatched(policies: PolicyMap, stores: bool = False) -> list[int]:
    """Returns the numbers of the entries to warn of, as far as is known so far."""
    memory = policies._memory
    known = memory.matched | memory.warned | (memory.parameters if stores else set())
    return [
        number
        for number, (pattern, _) in enumerate(policies.entries)
        if number not in known and not is_optional(pattern)
    ]


def warn_of_unmatched(
    policies: PolicyMap,
    of_classes: str = "",
    matched: Iterable[int] = (),
    *,
    stores: bool = False,
) -> None:
    """Warns, once, of the entries that matched no module that was called so far.

    Warnings about classes end with `of_classes`. The entries `matched` are known to
    match, too. A caller that `stores` parameters accepts entries that name them.
    """
    memory = policies._memory
    memory.matched.update(matched)
    for number in unmatched(policies, stores):
        memory.warned.add(number)
        pattern, _ = policies.entries[number]
        fact = f"matched no module. {advice_on(pattern, memory.seen)}"
        if number in memory.parameters:
            fact = "names a parameter."
        if isinstance(pattern, type):
            fact += of_classes
        elif not stores and "/" in (text_of(pattern) or ""):
            fact += " Only cast_params reads names of parameters."
        warn(f"PolicyMap: {describe(pattern)} {fact}")


class _Memory(NamedTuple):
    """The modules that one `PolicyMap` was asked about; no part of its value.

    JAX traces a jitted function once: a match counts for later calls with the map.

    Attributes:
      matched: the numbers of the entries that matched a module.
      warned: the numbers of the entries that were warned about.
      seen: the classes of the modules, by path.
      parameters: the numbers of the entries that named a parameter.
      names: the names of operations that decided something, or were warned about.
    """

    matched: set[int]
    warned: set[int]
    seen: dict[tuple[str, ...], type]
    parameters: set[int]
    names: set[str]


def _computable(policy: object, call: str) -> Policy:
    """Returns a policy that a program may compute in; `{}` in `call` is its place."""
    text = repr(str(policy)) if isinstance(policy, Policy) else written(policy)
    call, hint = call.replace("{}", text), ""
    if isinstance(policy, Mapping) and not holds_arrays(policy):
        hint = f' Write PolicyMap("mixed_bfloat16", {policy!r}).'
    elif holds_arrays(policy) and "(fn, " in call:
        first = f"{call.partition(',')[0]}, policy)"
        hint = f" What fn is called with goes into a second call: {first}(*args)."
    try:
        policy = get_policy(cast(Policy | str, policy))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{call}: {error}{hint}") from None
    if not is_castable(policy.compute_dtype):
        raise ValueError(
            f"{call}: cannot compute in {policy.compute_dtype.name}. Use a compute "
            "dtype of float16, bfloat16 or float32."
        )
    return policy
