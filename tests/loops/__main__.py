"""Prints how wrong each loop is, and where its products run: `python -m tests.loops`.

Names of loops, or of the files that they stand in, choose some. An error is that of the
worst leaf of the values, and of the gradients. `half` is every product in half, `OD`
the library's recipe of products alone, `full` the policy with all products in f32; the
columns of a network leave out what only a recursion needs. At the end: how many
recursions that need f32 have it, and how many networks lose a product.
"""

import argparse
import collections
import time
from collections.abc import Sequence

import tests.conftest  # noqa: F401  # JAX as in the tests, before it is imported

# isort: split
from tests.loops import measure
from tests.loops.measured import ALREADY, IN_F32_TODAY, NEEDS
from tests.loops.table import LOOPS, Loop

COLUMNS = ("half", "OD", "library", "full", "f32")


def verdict(
    name: str,
    loop: Loop,
    errors: dict[str, measure.Errors],
    placed: measure.Products,
) -> str:
    """Returns what the library does to a loop, in a word."""
    if not loop.is_recursion:
        most = IN_F32_TODAY.get(name, 0)
        return "loses" if placed.full_in_loops + placed.full > most else "keeps"
    if measure.is_kept(errors["library"], errors["full"]):
        return "kept"
    return "wrong" if errors["half"].worst > measure.MOST_IN_HALF else "bears half"


def line(name: str, loop: Loop, columns: Sequence[str]) -> tuple[str, str]:
    """Returns the verdict of a loop and the text of its row."""
    start = time.perf_counter()
    errors = measure.errors(loop.idiom, *columns)
    placed = measure.products(loop.idiom)
    found = verdict(name, loop, errors, placed)
    texts = (
        f"{errors[c].value:8.1e} {errors[c].gradient:8.1e}" if c in errors else " " * 17
        for c in COLUMNS
    )
    loops = f"{placed.half_in_loops:3} h {placed.full_in_loops:2} f"
    rest = f"{placed.half:2} h {placed.full} f"
    kind = "recursion" if loop.is_recursion else "network"
    seconds = time.perf_counter() - start
    text = f"{name:48} {' '.join(texts)} {loops} {rest} {kind} {found} {seconds:.1f}s"
    return f"{kind} {found}", text


def confusion(verdicts: dict[str, str]) -> str:
    """Returns the counts of what was measured, by the table of `measured.py`."""
    lines = []
    for title, table in (("needs f32", NEEDS), ("has f32 already", ALREADY)):
        of_table = [verdicts[name] for name in table if name in verdicts]
        kept = of_table.count("recursion kept")
        lines.append(f"recursion that {title}: {kept} of {len(of_table)} kept in f32")
    others = NEEDS.keys() | ALREADY.keys()
    bears = [v for name, v in verdicts.items() if name not in others]
    recursions = [v for v in bears if v.startswith("recursion")]
    kept = recursions.count("recursion kept")
    lines.append(
        f"recursion that bears half: {kept} of {len(recursions)} kept in f32, "
        f"{recursions.count('recursion wrong')} wrong"
    )
    networks = [v for v in bears if v.startswith("network")]
    lost = networks.count("network loses")
    lines.append(f"network: {lost} of {len(networks)} lose a product")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of loops or of their files")
    parser.add_argument("--fast", action="store_true", help="without f64")
    options = parser.parse_args()
    titles = " ".join(f"{c:^17}" for c in (*COLUMNS[:-1], "f32 to f64"))
    print(f"{'':48} {titles}")
    columns = " ".join(f"{'value':>8} {'gradient':>8}" for _ in COLUMNS)
    print(f"{'loop':48} {columns} {'in loops':10} rest    verdict")
    verdicts: dict[str, str] = {}
    start = time.perf_counter()
    for name, loop in LOOPS.items():
        if options.names and not {name, loop.idiom.field} & {*options.names}:
            continue
        shown = COLUMNS if loop.is_recursion else ("OD", "library", "f32")
        if options.fast:
            shown = shown[:-1]
        try:
            verdicts[name], text = line(name, loop, shown)
        except Exception as e:
            verdicts[name], text = "raised", f"{name:48} {type(e).__name__}: {e}"
        print(text, flush=True)
    counts = sorted(collections.Counter(verdicts.values()).items())
    print(", ".join(f"{count} {each}" for each, count in counts))
    print(confusion(verdicts))
    print(f"{time.perf_counter() - start:.0f}s")


main()
