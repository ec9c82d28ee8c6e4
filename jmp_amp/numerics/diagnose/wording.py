"""The words for a site: where it is, what it made, and how much of it."""

from __future__ import annotations

from jmp_amp.numerics.locate.sites import Site
from jmp_amp.reports.rows import Equation
from jmp_amp.reports.tables import file_name


def place(site: Site | Equation) -> str:
    """Returns the operation of a site or an equation, its module and its line."""
    text = f"{site.operation} in {site.module}" if site.module else site.operation
    return text if site.source is None else f"{text} ({file_name(site.source)})"


def run(site: Site) -> str:
    """Returns the direction and the dtype of a site, and its first bad turn."""
    text = f"{site.direction}, {site.dtype}"
    return text if site.turn is None else f"{text}, turn {site.turn}"


def number(value: float | None) -> str:
    """Returns a number with three digits, or all before the point; "" for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e5 else f"{value:.3g}"


def share(value: float) -> str:
    """Returns a share as a percentage with two digits; "" for none."""
    if not value:
        return ""
    if value < 0.0001:
        return "<0.01%"
    return f"{100 * value:.0f}%" if value >= 0.095 else f"{100 * value:.2g}%"
