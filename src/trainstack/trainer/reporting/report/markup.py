"""HTML and SVG from nested calls, escaped by default."""

from __future__ import annotations

from html import escape

_VOID = frozenset({"meta", "line", "path", "circle", "rect", "br"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """`<name attributes>children</name>`; children and values that are no `Markup` are escaped.

    An underscore at an attribute's end is left out, others become hyphens: `class_`, `stroke_width`. An attribute of
    None is left out, one of True has no value.
    """
    head = name
    for key, value in attributes.items():
        if value is not None:
            head += f" {key.removesuffix('_').replace('_', '-')}"
            head += "" if value is True else f'="{escape(str(value), quote=True)}"'
    if name in _VOID and not children:
        return Markup(f"<{head}/>")
    return Markup(f"<{head}>{join_markup(*children)}</{name}>")


def join_markup(*children: object) -> Markup:
    """`children` one after the other, those escaped that are no `Markup`; None is nothing."""
    known = (child for child in children if child is not None)
    return Markup("".join(c if isinstance(c, Markup) else escape(str(c), quote=True) for c in known))


def table(columns: tuple[str, ...], rows: object, *, class_: str | None = None) -> Markup:
    """A table of `rows`, each a sequence of cells, that scrolls on its side if it is too wide."""
    head = tag("thead", tag("tr", *(tag("th", column) for column in columns))) if any(columns) else None
    body = tag("tbody", *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows))  # type: ignore[attr-defined]
    return tag("div", tag("table", head, body), class_=f"scroll {class_ or ''}".strip())
