"""Patterns: which Flax modules an entry of a `PolicyMap` is for."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from flax import linen as nn
from flax import nnx

# Modules that compute in f32 whatever surrounds them, and hand on the compute dtype: a
# mean and a variance over many values need f32 (Micikevicius et al. 2018,
# arXiv:1710.03740, section 3.3), the values that they normalise do not.
_NORMS = tuple(
    getattr(library, name)
    for library in (nn, nnx)
    for name in (
        "BatchNorm LayerNorm GroupNorm RMSNorm InstanceNorm WeightNorm SpectralNorm"
    ).split()
)

_REGEX = "re:"
_FLAGS = {"a": re.A, "i": re.I, "m": re.M, "s": re.S, "x": re.X}


class ModuleInfo(NamedTuple):
    """A called module, as the patterns of a `PolicyMap` see it.

    Attributes:
      path: the names that lead to it from the outermost module: linen names, or nnx
        attributes and indices, `("blocks", "0", "attn")`; empty for the outermost one.
      cls: its class.
      name: its own name, the last of the path; None for the outermost one.
      method: the name of the called method; `"__call__"` in `cast_params`.

    Example:
      >>> import jmp_amp as amp
      >>> from flax import linen as nn
      >>> wide = lambda info: issubclass(info.cls, nn.Dense) and "mlp" in info.path
      >>> policy = amp.PolicyMap("mixed_float16", {wide: "mixed_bfloat16"})
      >>> policy.match(amp.ModuleInfo(("mlp", "up"), nn.Dense, "up")) is not None
      True
    """

    path: tuple[str, ...]
    cls: type
    name: str | None
    method: str = "__call__"


Pattern = type | str | re.Pattern[str] | Callable[[ModuleInfo], bool]


class GlobIfPresent(str):
    """A glob for modules that a model may have or not: no `PolicyMap` warns of it.

    The entries that a recipe brings along have it. It is equal to the glob as text.
    """


@dataclasses.dataclass(frozen=True)
class IfPresent:
    """A function of a `ModuleInfo` for modules that a model may have or not, likewise.

    Attributes:
      function: the function.
    """

    function: Callable[[ModuleInfo], bool]

    def __call__(self, info: ModuleInfo) -> bool:
        return self.function(info)


def is_optional(pattern: Pattern) -> bool:
    """Whether no `PolicyMap` warns that the pattern matched no module."""
    return isinstance(pattern, GlobIfPresent | IfPresent)


def matches_path(path: str, glob: str) -> bool:
    """Whether a glob matches the whole of a path; `**` stands for any names."""
    return _matches_names(_names(path), _names(glob))


def paths_matching(paths: Iterable[str], glob: str) -> set[str]:
    """Returns the paths of a report that a glob matches.

    Reports begin a path with the class of the outermost module, and with the functions
    that are jitted around it; a glob need not. Nor need it tell methods.
    """
    names, paths = _names(glob), list(paths)
    for of_path in (_names, lambda path: _of_modules(_names(path))):
        left = [(path, of_path(path)) for path in paths]
        found = {path for path, each in left if _matches_names(each, names)}
        while glob and left and not found:
            left = [(path, each[1:]) for path, each in left if len(each) > 1]
            found = {path for path, each in left if _matches_names(each, names)}
        if found:
            return found
    return set()


def _of_modules(names: Sequence[str]) -> list[str]:
    """Returns the names of modules in a path that tells their methods.

    `Outer.encode/embed.attend` is Outer/embed. A module that calls a method of its own
    is there twice: `Outer/Outer.encode`.
    """
    plain = [name.partition(".")[0] for name in names]
    return [
        name
        for i, name in enumerate(plain)
        if name == names[i] or i == 0 or name != plain[i - 1]
    ]


# Returns the names of a glob without those that lead to the outermost module, as they
# are in the paths of a report; None if it has no such names.
Inside = Callable[[Sequence[str]], Sequence[str] | None]


def inside_of(root: str) -> Inside:
    """Returns the `Inside` for an outermost module of that name, or of that class."""

    def inside(names: Sequence[str]) -> Sequence[str] | None:
        plain = _of_modules(names)
        return plain[plain.index(root) + 1 :] if root in plain else None

    return inside


def inside_of_tree(outer: Collection[str]) -> Inside:
    """Returns the `Inside` for a tree of parameters, by its outer names."""

    def inside(names: Sequence[str]) -> Sequence[str] | None:
        for number, name in enumerate(names[:-1]):
            if name in outer or re.search(r"[*?[]", name):
                return None
            # Not a name that linen gives: `Dense_0`.
            if re.fullmatch(r"[A-Z]\w*(?<!\d)", name):
                return inside_of(name)(names[number:])
        return None

    return inside


def _names(text: str) -> list[str]:
    return text.split("/") if text else []


def is_norm(value: object) -> bool:
    """Whether a value is a norm class: a module's class, or the pattern of an entry."""
    return isinstance(value, type) and issubclass(value, _NORMS)


def describe(pattern: Pattern) -> str:
    """Returns a pattern as its user would name it."""
    if isinstance(pattern, IfPresent):
        return describe(pattern.function)
    if isinstance(pattern, type):
        return f"{pattern.__module__}.{pattern.__qualname__}"
    text = text_of(pattern)
    if text is not None:
        return text if text.startswith(_REGEX) else repr(text)
    return getattr(pattern, "__qualname__", repr(pattern))


def checked_pattern(pattern: object) -> Pattern:
    """Returns a pattern as it is kept; raises if it is none."""
    if isinstance(pattern, type):
        if not issubclass(pattern, nn.Module | nnx.Module):
            raise TypeError(
                f"PolicyMap: the class {describe(pattern)} is no Flax module class. A "
                "pattern is a subclass of flax.linen.Module or flax.nnx.Module, a "
                "glob of the path, a re.Pattern, or a function of a ModuleInfo."
            )
        return pattern
    if isinstance(pattern, GlobIfPresent):
        return GlobIfPresent(_glob(pattern))
    if isinstance(pattern, str):
        return _glob(pattern)
    if isinstance(pattern, re.Pattern):
        if not isinstance(pattern.pattern, str):
            raise TypeError(f"PolicyMap: {pattern!r} is a pattern of bytes, not text.")
        return _with_flags_inside(pattern)
    if isinstance(pattern, nn.Module | nnx.Module):
        raise TypeError(
            f"PolicyMap: the pattern is a module, a {type(pattern).__name__}. Name its "
            "class or its path, or mark the module: with_policy(policy)(module)."
        )
    if callable(pattern):
        if not isinstance(pattern, Hashable):
            raise TypeError(
                f"PolicyMap: the function {pattern!r} cannot be hashed, and a map is "
                "part of the key of JAX's caches. Use a plain function."
            )
        return cast(Pattern, pattern)
    raise TypeError(
        f"PolicyMap: {pattern!r} is no pattern. Use a module class, a glob of the path "
        'such as "**/head", a re.Pattern, or a function of a ModuleInfo.'
    )


def _with_flags_inside(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Returns the same pattern with all of it in its text, which can be read back."""
    flags = "".join(letter for letter, flag in _FLAGS.items() if pattern.flags & flag)
    if not flags or pattern.pattern.startswith(f"(?{flags})"):
        return pattern
    return re.compile(f"(?{flags}){pattern.pattern}")


def _glob(glob: str) -> str:
    names = _names(glob)
    if glob.startswith(_REGEX):
        raise ValueError(
            f"PolicyMap: {glob!r} is a glob. Give re.compile({glob[3:]!r}) for a "
            'regular expression; only from_dict reads "re:".'
        )
    if ";" in glob or glob.startswith("<") or glob != glob.strip():
        raise ValueError(
            f"PolicyMap: the glob {glob!r} has characters that no path has. Write the "
            'names of modules, such as "**/head".'
        )
    if not all(names):
        raise ValueError(
            f"PolicyMap: the glob {glob!r} has an empty name, and no path has one. "
            f'Write it as {"/".join(filter(None, names))!r}; "" is the outermost '
            "module."
        )
    for name in names:
        if "**" in name and name != "**":
            raise ValueError(
                f"PolicyMap: the glob {glob!r} has ** inside of a name. Give it a name "
                'of its own, such as "**/head", or use * inside of a name.'
            )
    return glob


def matches(pattern: Pattern, info: ModuleInfo, inside: Inside | None = None) -> bool:
    """Whether a pattern is for a module; `inside` reads globs as reports print them."""
    if isinstance(pattern, type):
        return issubclass(info.cls, pattern)
    if isinstance(pattern, str):
        names = _names(pattern)
        if inside is None or _matches_names(info.path, names):
            return _matches_names(info.path, names)
        found = inside(names)
        return found is not None and _matches_names(info.path, found)
    if isinstance(pattern, re.Pattern):
        return matches_names(pattern, info.path)
    return bool(pattern(info))


def matches_names(pattern: Pattern, names: Sequence[str]) -> bool:
    """Whether a pattern is a text that matches the names of modules or scopes."""
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch("/".join(names)) is not None
    return isinstance(pattern, str) and _matches_names(names, _names(pattern))


def _matches_names(path: Sequence[str], pattern: Sequence[str]) -> bool:
    place = position = 0
    # Where to go on if a name does not match: the latest `**` takes one name more. An
    # earlier `**` need not, because the later one takes whatever that would leave.
    resumed: tuple[int, int] | None = None
    while position < len(path):
        if place < len(pattern) and pattern[place] == "**":
            place += 1
            resumed = place, position
        elif place < len(pattern) and fnmatch.fnmatchcase(
            path[position], pattern[place]
        ):
            place, position = place + 1, position + 1
        elif resumed is not None:
            resumed = place, position = resumed[0], resumed[1] + 1
        else:
            return False
    return all(name == "**" for name in pattern[place:])


def text_of(pattern: Pattern) -> str | None:
    """Returns the text that `pattern_from` reads back, or None if there is none."""
    if isinstance(pattern, re.Pattern):
        return f"{_REGEX}{pattern.pattern}"
    return str(pattern) if isinstance(pattern, str) else None


def pattern_from(text: str) -> str | re.Pattern[str]:
    """Returns the pattern that `text_of` wrote."""
    if isinstance(text, str) and text.startswith(_REGEX):
        try:
            return re.compile(text.removeprefix(_REGEX))
        except re.error as error:
            raise ValueError(
                f"PolicyMap: {text!r} is no regular expression: {error}. Mend it, or "
                'write a glob such as "**/head".'
            ) from None
    return text


def advice_on(pattern: Pattern, seen: Mapping[tuple[str, ...], type]) -> str:
    """Returns the hint about a pattern that matched no module; `seen` is by path."""
    if not seen:
        return (
            "No Flax module was traced here. Does the function call the model, and "
            "take an nnx module as an argument or close over it? A jitted function "
            "that JAX traced before under an equal map hides the paths of its modules."
        )
    if isinstance(pattern, type):
        other = _of_the_other_library(pattern, seen.values())
        if other is not None:
            return other
        if all(each in (nn.Module, nnx.Module) for each in seen.values()):
            return (
                "The parameters are in a tree that tells no classes, only the names "
                "that linen gave by itself: pass the module as model=."
            )
        names = sorted({each.__name__ for each in seen.values()})
        return f"The classes of the modules called are {', '.join(names)}."
    paths = ["/".join(path) for path in seen if path]
    if not paths:
        return 'Only the outermost module was called; its path is "".'
    text = text_of(pattern)
    if isinstance(pattern, str) and (slip := _slip(pattern, seen, paths)):
        return slip
    close = difflib.get_close_matches(text or "", paths, n=1, cutoff=0)
    if text is not None and close:
        return f"The closest path of a module called is {close[0]!r}."
    return f"The paths of the modules called are {', '.join(map(repr, paths[:10]))}."


def _slip(glob: str, seen: Mapping[tuple[str, ...], type], paths: list[str]) -> str:
    """Returns what to write in place of a class's name, or of dots; "" if neither."""
    name = re.split(r"[./]", glob)[-1]
    for cls in seen.values():
        if cls.__name__ == name:
            return (
                f"{name} is a class: give the class itself, such as {_module_of(cls)}."
                f"{name}, and not its name. Globs are of paths, such as {paths[0]!r}."
            )
    slashed = glob.replace(".", "/")
    if slashed != glob:
        close = difflib.get_close_matches(slashed, paths, n=1, cutoff=0)
        return (
            f"The names of a path are joined by '/'. The closest path of a module "
            f"called is {close[0]!r}."
        )
    return ""


def _module_of(cls: type) -> str:
    """Returns how a file imports what has the class: `nn`, `nnx`, `my_model`."""
    for library, short in ((nn, "nn"), (nnx, "nnx")):
        if getattr(library, cls.__name__, None) is cls:
            return short
    return cls.__module__


def _of_the_other_library(pattern: type, seen: Iterable[type]) -> str | None:
    wanted, found = nn.Module, nnx.Module
    if issubclass(pattern, nnx.Module):
        wanted, found = found, wanted
    seen = list(seen)
    if any(issubclass(each, wanted) for each in seen):
        return None
    names = sorted({each.__name__ for each in seen if issubclass(each, found)})
    kinds = {nn.Module: "linen", nnx.Module: "nnx"}
    return (
        f"It is a class of {kinds[wanted]}, and the modules called are {kinds[found]} "
        f"modules: {', '.join(names)}."
    )
