"""Write the numbers of benchmarks/results into README.md, benchmarks/README.md and the pages in docs.

    python scripts/write_figures.py

A number in a text has an entry in `docs/figures.toml`, below the name of its page: a piece of the text with `{}` where
the number stands, then its place in a result and a format of Python:

    ["README.md"]
    'It is {} times as fast' = 'scoring/25M/GSM8K, groups of 8/times/padded, arrival .1f'

`#` in a piece is any other number, and a white space any white space, so that a paragraph can be wrapped again; the
rest stands for itself. The page must have the piece once. The place can have `*` and begin with `min`, `max`, `mean`,
`median`, `std`, `sum` or `count`.

The comment above a table has the place of its rows (or several, with `; ` between them) and a row with places below
it, `{0}` and `{1}` for what the stars stand for, and `{name}` for the last name. A cell whose value the result does not
have stays empty:

    <!-- table scoring/25M/* | {0} | {tokens:,} | {times/TRL:.1f}x | -->
    | workload | tokens | TRL |
    | --- | --- | --- |

A line below `<!-- source scoring -->` gets the command, hardware, versions and date of a result.
"""

from __future__ import annotations

import functools
import json
import re
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures.toml"
NUMBER = r"(?<![\w.,+-])(?>[-+]?\d(?:[\d,.]*\d)?(?:e[-+]?\d+)?%?)"
TABLE = re.compile(
    r"(?P<head><!-- table (?P<places>[^|\n]+) (?P<row>\|[^\n]+\|) -->\n\|[^\n]+\n\|[-| ]+\n)(?P<shown>(?:\|[^\n]*\n)*)"
)
SOURCE = re.compile(r"^(?P<head><!-- source (?P<name>[\w-]+) -->\n)[^\n]*$", re.MULTILINE)
FUNCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "max": max,
    "mean": statistics.mean,
    "median": statistics.median,
    "std": statistics.stdev,
    "sum": sum,
    "count": len,
}


def pages() -> list[Path]:
    """Return the pages that have figures."""
    docs = [page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts]
    return [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted(docs)]


@functools.cache
def figures(file: Path = FIGURES) -> dict[str, dict[str, str]]:
    """Return the figures of each page: the place and format by the piece of text around the number."""
    found = tomllib.loads(file.read_text(encoding="utf-8"))
    if unknown := sorted(found.keys() - {page.relative_to(ROOT).as_posix() for page in pages()}):
        raise ValueError(f"{file.name} has figures of {', '.join(unknown)}: no such page")
    return found


@functools.cache
def result(name: str) -> dict[str, Any]:
    """Return a file of results."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        raise KeyError(f"no result {file.relative_to(ROOT)}")
    return json.loads(file.read_text(encoding="utf-8"))


def matches(place: str) -> Iterator[tuple[list[str], Any]]:
    """Yield the names at the stars, and the value, of each place in the results."""
    name, *path = place.split("/")
    found: list[tuple[list[str], Any]] = [([], result(name)["values"])]
    for part in path:
        pattern = re.compile(re.escape(part).replace(r"\*", "(.*)"))
        found = [
            ([*names, *match.groups()], inner)
            for names, value in found
            if isinstance(value, dict)
            for key, inner in value.items()
            if (match := pattern.fullmatch(key))
        ]
    yield from found


def number(what: str, base: str = "") -> float:
    """Return the number at a place, or what a function makes of those at several."""
    function, _, rest = what.partition(" ")
    applies = bool(rest) and function in FUNCTIONS
    if applies and base and any(matches(base + what)):  # a name, such as `mean difference`
        applies = False
    place = base + (rest if applies else what)
    values = [value for _, value in matches(place)]
    if applies and values:
        return FUNCTIONS[function](values)
    if len(values) != 1 or isinstance(values[0], dict):
        raise KeyError(f"{place!r} must be one number, got {len(values)} values")
    return values[0]


def shown(value: float, style: str) -> str:
    """Return a number as text; exponents are short, as in 1.2e-6."""
    return re.sub(r"e([-+])0", r"e\1", format(value, style))


def rows(place: str) -> Iterator[tuple[list[str], str]]:
    """Yield the names at the stars, and the place without them, of each row of a table."""
    paths: list[tuple[list[str], str]] = [([], place.split("/")[0])]
    for part in place.split("/")[1:]:
        pattern = re.compile(re.escape(part).replace(r"\*", "(.*)"))
        paths = [
            ([*names, *match.groups()], f"{path}/{key}")
            for names, path in paths
            for key in next(matches(path))[1]
            if (match := pattern.fullmatch(key))
        ]
    yield from paths


def table(places: str, row: str) -> str:
    """Return the lines of a table below its heading."""
    lines = []
    for names, place in (each for one in places.split("; ") for each in rows(one)):
        cells = [_cell(cell, names, place + "/") for cell in row.strip("|").split("|")]
        lines.append("|" + "|".join(cells) + "|\n")
    return "".join(lines)


def _cell(cell: str, names: list[str], base: str) -> str:
    def value(found: re.Match[str]) -> str:
        what, style = found[1], found[2] or ""
        if what == "name":
            return base.split("/")[-2]
        return names[int(what)] if what.isdigit() else shown(number(what, base), style)

    try:
        return re.sub(r"\{([^{}:]+)(?::([^{}]*))?\}", value, cell)
    except KeyError:
        return " "


def source(name: str) -> str:
    """Return where a result comes from."""
    found = result(name)
    if found["kind"] == "computed":
        return f"Computed by `{found['command']}`."
    machine = found["hardware"]
    threads = f"{machine['cores']} cores, {machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    return f"`{found['command']}`: {machine.get('GPU') or machine['CPU']}, {threads}; {versions}; {found['date']}."


def expression(piece: str) -> re.Pattern[str]:
    """Return what finds a piece of text, with the number at `{}` as its group."""
    kinds = {"{}": f"({NUMBER})", "#": NUMBER}
    parts = re.split(r"(\{\}|#|\s+)", piece)
    return re.compile("".join(kinds.get(part, r"\s+" if part.isspace() else re.escape(part)) for part in parts))


def spans(page: str, text: str, entries: Mapping[str, str]) -> dict[tuple[int, int], str]:
    """Return the place and format of each figure by where it stands in the text, the last first."""
    found: dict[tuple[int, int], str] = {}
    for piece, what in entries.items():
        if piece.count("{}") != 1:
            raise ValueError(f"{page}: {piece!r} must have one {{}}")
        places = list(expression(piece).finditer(text))
        if len(places) != 1:
            raise ValueError(f"{page}: must have {piece!r} once, has it {len(places)} times")
        if places[0].span(1) in found:
            raise ValueError(f"{page}: {piece!r} is the number of another figure")
        found[places[0].span(1)] = what
    return dict(sorted(found.items(), reverse=True))


def written(page: str, text: str, entries: Mapping[str, str]) -> str:
    """Return a page with the numbers of the results."""
    for (start, end), what in spans(page, text, entries).items():
        place, _, style = what.rpartition(" ")
        try:
            text = text[:start] + shown(number(place), style) + text[end:]
        except KeyError as error:
            raise KeyError(f"{page}: {error.args[0]}") from None
    text = TABLE.sub(lambda found: found["head"] + table(found["places"], found["row"]), text)
    return SOURCE.sub(lambda found: found["head"] + source(found["name"]), text)


def main() -> None:
    for page in pages():
        name, before = page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
        if (after := written(name, before, figures().get(name, {}))) != before:
            page.write_text(after, encoding="utf-8")
            print(f"written: {name}")


if __name__ == "__main__":
    main()
