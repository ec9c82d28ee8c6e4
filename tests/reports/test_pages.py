"""A report as HTML: what its style says, and where a browser puts its text."""

import html
import itertools
import json
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jmp_amp as amp

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Tells where the text of each cell begins and ends, in pixels from the left.
_SCRIPT = """
<script>
const rows = [...document.querySelectorAll("tr")].map(row =>
  [...row.cells].map(cell => {
    const node = cell.firstChild;
    if (!node) return null;
    const range = document.createRange();
    range.setStart(node, node.data.length - node.data.trimStart().length);
    range.setEnd(node, node.data.length);
    const box = range.getBoundingClientRect();
    return [cell.textContent.trim(), box.left, box.right];
  }));
document.body.innerHTML = "<pre></pre>";
document.querySelector("pre").textContent = JSON.stringify(rows);
</script>
"""


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32, name="up")(nn.LayerNorm(name="norm")(x))
        return nn.Dense(16, name="down")(nn.relu(x))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="head")(Block(name="block")(x))


@pytest.fixture(scope="module")
def page():
    x = jax.ShapeDtypeStruct((4, 16), jnp.float32)
    params = jax.eval_shape(Net().init, jax.random.key(0), x)
    return amp.explain(lambda p, x: jnp.sum(Net().apply(p, x)))(params, x)._repr_html_()


def test_the_style_keeps_the_spaces_that_indent_modules_and_columns_apart(page):
    cells = re.findall(r'<t[dh] style="([^"]*)">([^<]*)<', page)
    assert all("padding: 0 0." in style for style, _ in cells)
    indented = [style for style, cell in cells if cell.startswith("  ")]
    assert indented and all("white-space: pre" in style for style in indented)


@pytest.fixture(scope="module")
def shown(page, tmp_path_factory):
    """The cells of the rows that have any: text, left end, right end."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(_BROWSERS)} is installed")
    file = tmp_path_factory.mktemp("page") / "page.html"
    text = f'<!doctype html><meta charset="utf-8"><body>{page}{_SCRIPT}</body>'
    file.write_text(text, encoding="utf-8")
    options = "--headless --no-sandbox --disable-gpu --window-size=1200,900".split()
    profile = f"--user-data-dir={file.parent / 'profile'}"
    command = [browser, *options, profile, "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.search(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    assert found, done.stdout
    return json.loads(html.unescape(found[1]))


def test_a_browser_shows_a_module_to_the_right_of_the_module_around_it(shown):
    left = {row[0][0]: row[0][1] for row in shown if row[0]}
    assert left["Net"] < left["block"] < left["up"]
    assert left["block"] == left["head"] and left["up"] == left["down"]
    assert left["Net"] == left["(top level)"] == left["all"]


def test_a_browser_shows_columns_that_do_not_touch(shown):
    for row in shown:
        cells = [cell for cell in row if cell]
        for (_, _, end), (_, begin, _) in itertools.pairwise(cells):
            assert begin - end >= 10, row  # a space is 4 pixels of 16


def test_a_browser_shows_numbers_that_end_in_one_place(shown):
    heading = next(row for row in shown if row[0] and row[0][0] == "module")
    column = next(i for i, cell in enumerate(heading) if cell[0] == "FLOP")
    (end,) = {
        row[column][2] for row in shown[: shown.index(heading) + 8] if row[column]
    }
    assert end == heading[column][2]
