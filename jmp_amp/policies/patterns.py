"""Patterns: which Flax modules an entry of a `PolicyMap` is for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, cast

from flax import linen as nn
from flax import nnx

# Modules that compute in f32 whatever surrounds them, and hand on the compute dtype: a
# mean and a variance over many values need f32 (Micikevicius et al. 2018,
# arXiv:1710.03740, section 3.3), the values that they normalise do not.
_NORMS = tuple(
    getattr(library, f"{name}Norm")
    for library in (nn, nnx)
    for name in "Batch Layer Group RMS Instance Weight Spectral".split()
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


def attend_of_embedding(info: ModuleInfo) -> bool:
    """Whether a module is an embedding that makes logits, called so.

    `nn.Embed` and `nnx.Embed` are; so are classes of others that are named alike.
    """
    return info.method == "attend" and "embed" in info.cls.__name__.lower()


def is_optional(pattern: Pattern) -> bool:
    """Whether no `PolicyMap` warns that the pattern matched no module."""
    return isinstance(pattern, GlobIfPresent) or pattern is attend_of_embedding


def is_norm(value: object) -> bool:
    """Whether a value is a norm class: a module's class, or the pattern of an entry."""
    return isinstance(value, type) and issubclass(value, _NORMS)


def matches_path(path: str, glob: str) -> bool:
    """Whether a glob matches the whole of a path; `**` stands for any names."""
    return matches_names(glob, _names(path))


def paths_matching(paths: Iterable[str], glob: str) -> set[str]:
    """Returns the paths of a report that a glob matches.

    Reports begin a path with the class of the outermost module, and with the functions
    that are jitted around it; a glob need not. Nor need it tell methods.
    """
    as_written = {path: _names(path) for path in paths}
    of_modules = {path: _of_modules(names) for path, names in as_written.items()}
    for left in (as_written, of_modules):
        while left:
            found = {path for path, names in left.items() if matches_names(glob, names)}
            if found:
                return found
            # The outermost module is no part of the glob "".
            left = {p: names[1:] for p, names in left.items() if glob and names[1:]}
    return set()


def _of_modules(names: Sequence[str]) -> list[str]:
    """Returns the names of modules in a path that tells their methods.

    `Outer.encode/embed.attend` is Outer/embed. A module that calls a method of its own
    is there twice: `Outer/Outer.encode`.
    """
    plain = [name.partition(".")[0] for name in names]
    pairs = zip(plain, names, ["", *plain], strict=False)
    return [name for name, given, before in pairs if given == name or name != before]


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
        for name in names[:-1]:
            if name in outer or re.search(r"[*?[]", name):
                return None
            # Not a name that linen gives: `Dense_0`.
            if re.fullmatch(r"[A-Z]\w*(?<!\d)", name):
                return inside_of(name)(names)
        return None

    return inside


def matches(pattern: Pattern, info: ModuleInfo, inside: Inside | None = None) -> bool:
    """Whether a pattern is for a module; `inside` reads globs as reports print them."""
    if isinstance(pattern, type):
        return issubclass(info.cls, pattern)
    if not isinstance(pattern, str | re.Pattern):
        return bool(pattern(info))
    if matches_names(pattern, info.path):
        return True
    found = inside(_names(pattern)) if inside and isinstance(pattern, str) else None
    return found is not None and _is_path_of(info.path, found)


def matches_names(pattern: Pattern, names: Sequence[str]) -> bool:
    """Whether a pattern is a text that matches the names of modules or scopes."""
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch("/".join(names)) is not None
    return isinstance(pattern, str) and _is_path_of(names, _names(pattern))


def _is_path_of(path: Sequence[str], pattern: Sequence[str]) -> bool:
    place = position = 0
    # Where to go on if a name does not match: the latest `**` takes one name more. An
    # earlier `**` need not, because the later one takes whatever that would leave.
    resumed: tuple[int, int] | None = None
    while position < len(path):
        if place < len(pattern) and pattern[place] == "**":
            place += 1
            resumed = place, position
        elif place < len(pattern) and fnmatchcase(path[position], pattern[place]):
            place, position = place + 1, position + 1
        elif resumed is not None:
            resumed = place, position = resumed[0], resumed[1] + 1
        else:
            return False
    return all(name == "**" for name in pattern[place:])


def _names(text: str) -> list[str]:
    return text.split("/") if text else []


def describe(pattern: Pattern) -> str:
    """Returns a pattern as its user would name it."""
    if isinstance(pattern, type):
        return f"{pattern.__module__}.{pattern.__qualname__}"
    text = text_of(pattern)
    if text is not None:
        return text if text.startswith(_REGEX) else repr(text)
    return getattr(pattern, "__qualname__", repr(pattern))


def text_of(pattern: Pattern) -> str | None:
    """Returns the text that `pattern_from` reads back, or None if there is none."""
    if isinstance(pattern, re.Pattern):
        return f"{_REGEX}{pattern.pattern}"
    return str(pattern) if isinstance(pattern, str) else None


def pattern_from(text: str) -> str | re.Pattern[str]:
    """Returns the pattern that `text_of` wrote."""
    if not (isinstance(text, str) and text.startswith(_REGEX)):
        return text
    try:
        return re.compile(text.removeprefix(_REGEX))
    except re.error as error:
        raise ValueError(
            f"PolicyMap: {text!r} is no regular expression: {error}. Mend it, or "
            'write a glob such as "**/head".'
        ) from None


def checked_pattern(pattern: object) -> Pattern:
    """Returns a pattern as it is kept; raises if it is none."""
    if isinstance(pattern, str):
        _check_glob(pattern)
        return pattern
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        # All of it in its text, which can be read back.
        flags = "".join(name for name, flag in _FLAGS.items() if pattern.flags & flag)
        if not flags or pattern.pattern.startswith(f"(?{flags})"):
            return pattern
        return re.compile(f"(?{flags}){pattern.pattern}")
    is_module = isinstance(pattern, nn.Module | nnx.Module)
    if isinstance(pattern, type):
        is_pattern = issubclass(pattern, nn.Module | nnx.Module)
    else:
        is_pattern = callable(pattern) and isinstance(pattern, Hashable)
    if not is_pattern or is_module:
        shown = f"a module, a {type(pattern).__name__}," if is_module else repr(pattern)
        raise TypeError(
            f"PolicyMap: {shown} is no pattern. Use a subclass of flax.linen.Module or "
            'flax.nnx.Module, a glob of the path such as "**/head", a re.Pattern of '
            "text, or a hashable function of a ModuleInfo. A module itself is marked: "
            "with_policy(policy)(module)."
        )
    return cast(Pattern, pattern)


def _check_glob(glob: str) -> None:
    names = _names(glob)
    mistakes = {
        "begins with re:": glob.startswith(_REGEX),
        "is a class or a function, which no text can say": glob.startswith("<"),
        "has characters that no path has": ";" in glob or glob != glob.strip(),
        "has an empty name": not all(names),
        "has ** inside of a name": any("**" in each for each in names if each != "**"),
    }
    for fact, is_made in mistakes.items():
        if is_made:
            raise ValueError(
                f"PolicyMap: the glob {glob!r} {fact}. Write the names of a path, such "
                'as "**/head", and * inside of a name. Give a regular expression as '
                "re.compile(...), a class or a function in Python."
            )


def advice_on(pattern: Pattern, seen: Mapping[tuple[str, ...], type]) -> str:
    """Returns the hint about a pattern that matched no module; `seen` is by path."""
    if not seen:
        return (
            "No Flax module was traced here. Does the function call the model, and "
            "take an nnx module as an argument or close over it? A jitted function "
            "that JAX traced before under an equal map hides the paths of its modules."
        )
    if isinstance(pattern, type):
        names = ", ".join(sorted({each.__name__ for each in seen.values()}))
        libraries = " and ".join(sorted(set(map(_library, seen.values()))))
        is_told = not set(seen.values()) <= {nn.Module, nnx.Module}
        return (
            f"It is a class of {_library(pattern)}. The classes of the modules called "
            f"are {names}, of {libraries}."
            + (
                ""
                if is_told
                else " A tree tells no classes: pass the module as model=."
            )
        )
    paths = ["/".join(path) for path in seen]
    if (text := text_of(pattern)) is None:
        return (
            f"The paths of the modules called are {', '.join(map(repr, paths[:10]))}."
        )
    (close,) = difflib.get_close_matches(text.replace(".", "/"), paths, 1, cutoff=0)
    name = re.split(r"[./]", text)[-1]
    classes = [describe(cls) for cls in seen.values() if cls.__name__ == name]
    remedy = f" Give the class {classes[0]} itself, not its name." if classes else ""
    path = repr(close) if close else '"", of the outermost one'
    return f"The closest path of a module called is {path}.{remedy}"


def _library(cls: type) -> str:
    return "nnx" if issubclass(cls, nnx.Module) else "linen"
