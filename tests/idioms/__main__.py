"""Prints how wrong each idiom is: `python -m tests.idioms [name or field ...]`.

Of the values and of the gradients, the leaf that is furthest over its bound. `-v`
prints every leaf. `--dtype float16` runs one dtype, `--wrong` prints what is wrong.
"""

import argparse
import collections
import time

import tests.conftest  # noqa: F401  # JAX as in the tests, before it is imported

# isort: split
from tests.idioms.measure import Leaf, leaves
from tests.idioms.table import IDIOMS
from tests.measures import HALF


def worst(rows: list[Leaf], kind: str) -> Leaf | None:
    of_kind = [row for row in rows if row.kind == kind]
    return max(of_kind, key=lambda row: row.policy / (row.bound or 1e-30), default=None)


def text(row: Leaf | None) -> str:
    if row is None:
        return f"{'':26}"
    return f"{row.policy:8.1e} {row.products:8.1e} {row.bound:8.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of idioms or of their fields")
    parser.add_argument("--dtype", choices=HALF, action="append")
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    chosen = [
        i
        for i in IDIOMS.values()
        if not options.names or {i.name, i.field} & {*options.names}
    ]
    print(f"{'':48} {'value':26} gradient")
    columns = " ".join(f"{c:>8}" for c in ("policy", "OD", "bound"))
    print(f"{'idiom':43} {'':4} {columns} {columns} verdict")
    verdicts: collections.Counter[str] = collections.Counter()
    for idiom in chosen:
        for dtype in options.dtype or HALF:
            start = time.perf_counter()
            short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
            try:
                rows = leaves(idiom, dtype)
            except Exception as e:
                print(f"{idiom.name:43} {short:4} raised {type(e).__name__}: {e}")
                verdicts["raised"] += 1
                continue
            wrong = [row for row in rows if not row.is_right]
            verdict = " ".join(dict.fromkeys(row.kind for row in wrong)) or "right"
            verdicts["wrong" if wrong else "right"] += 1
            both = " ".join(text(worst(rows, kind)) for kind in ("value", "gradient"))
            if options.wrong and not wrong:
                continue
            seconds = time.perf_counter() - start
            print(
                f"{idiom.name:43} {short:4} {both} {verdict} {seconds:.1f}s",
                flush=True,
            )
            if options.verbose:
                for row in rows:
                    mark = "" if row.is_right else " WRONG"
                    print(f"    {row.kind:8} {row.path:30} {text(row)}{mark}")
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))


main()
