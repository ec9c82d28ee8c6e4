"""Names of operations in a policy: `low`, `full` and `follow`."""

import itertools
from collections.abc import Iterable


def operation_names(names: Iterable[str], call: str) -> frozenset[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(
            f"{call}: {names!r} is not a collection of names. Use a set of strings, "
            'like {"tanh", "my_loss"}.'
        )
    found = set()
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"{call}: {name!r} is not a name. Operations are named by strings, "
                'like "tanh" or "my_loss".'
            )
        # JAX calls its primitives scatter-add, scatter-max, ...
        identifier = name.replace("-", "_")
        if not identifier.isidentifier():
            raise ValueError(
                f"{call}: {name!r} is not the name of an operation. Use the bare name "
                'of a primitive or a Python function, like "tanh" or "my_loss".'
            )
        found.add(identifier)
    return frozenset(found)


def refuse_overlap(classes: dict[str, frozenset[str]], call: str) -> None:
    for (first, names), (second, others) in itertools.combinations(classes.items(), 2):
        for name in sorted(names & others):
            raise ValueError(
                f"{call}: {name!r} is both in {first} and in {second}. An operation "
                "has one class: name it in one of them only."
            )
