"""Console tables of an inspected data set, and examples with the boundaries of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gym_rm.data.findings import Finding
from gym_rm.data.inspection import Inspection, Quantiles
from gym_rm.data.overlaps import Overlap
from gym_rm.data.token_lengths import ComparisonExample, RenderedReply, TokenLengths
from gym_rm.reports.transcripts import visible

SHOWN_BEFORE, SHOWN_AFTER = 12, 24  # tokens at the start and at the end of a long part of an example


def inspection_report(found: Inspection) -> Group:
    """Return what the terminal shows of an inspection."""
    parts: list[RenderableType] = [_summary(found), _lengths_table(found)]
    if "" not in found.sources or len(found.sources) > 1:
        parts.append(_counts_table("Source", found.sources))
    if any(found.objectives.values()):
        parts.append(_quantiles_table("Rating", found.objectives))
    parts.append(_findings_table("Dropped rows", found.dropped, "no row was dropped"))
    parts.append(_findings_table("Duplicates", [each for each in found.duplicates if each.count], "none"))
    parts += [_overlap_text(each) for each in found.overlaps]
    parts.append(_findings_table("Possible mistakes", found.remarks, "none found"))
    parts += [_example_text(each) for each in found.examples]
    return Group(*parts)


def _summary(found: Inspection) -> Text:
    used = sum(found.shapes.values())
    shapes = ", ".join(f"{count:,} {shape}" for shape, count in found.shapes.items())
    replies = ", ".join(f"{count:,} of {size}" for size, count in found.replies.items())
    lines = [
        f"{used:,} of {found.rows:,} rows are used ({shapes}).",
        f"Replies per comparison: {replies}. Pairs with a preference: {found.pairs:,}. Ties: {found.ties:,}. "
        f"Without ranks: {found.unranked:,}.",
    ]
    bias = found.length_bias
    if bias.accuracy is not None:
        lines.append(
            f"The preferred reply is the longer one in {bias.longer:,} pairs, the shorter one in {bias.shorter:,}, and "
            f"equally long in {bias.equal:,}: preferring length alone is right in {bias.accuracy:.1%}."
        )
    if found.steps is not None:
        lines.append(f"Labels of steps: {found.steps.count:,}, {found.steps.mean:.1%} good.")
    lines += [] if found.tokens is None else _token_lines(found.tokens)
    text = Text(visible(found.name), style="bold")
    return text.append("\n" + visible("\n".join(lines)), style="not bold")


def _token_lines(tokens: TokenLengths) -> list[str]:
    lines = [f"Tokens by {tokens.model}, of {tokens.comparisons:,} comparisons:"]
    if tokens.tokens:
        lines.append(
            f"  {tokens.tokens:,} in all; {tokens.unique_tokens:,} if replies share their prompt "
            f"({tokens.tokens / tokens.unique_tokens:.2f}x fewer)."
        )
    if tokens.max_length is not None:
        lines.append(f"  {tokens.too_long:,} comparisons are longer than max_length={tokens.max_length:,}.")
    lines += [f"  {each.count:,} cannot be read, for example {each.examples[0]}: {each.text}" for each in tokens.failed]
    return lines


def _lengths_table(found: Inspection) -> Table:
    table = _quantiles_table("Length", found.lengths)
    if found.tokens is not None and found.tokens.quantiles:
        table.add_row("tokens of a conversation", *(f"{value:,.0f}" for value in found.tokens.quantiles))
    if found.margins is not None:
        table.add_row("margin", *(f"{value:,.3g}" for value in _five(found.margins)))
    return table


def _quantiles_table(title: str, rows: Mapping[str, Quantiles | None]) -> Table:
    table = _table(title, "least", "median", "90 %", "99 %", "most")
    for name, values in rows.items():
        if values is not None:
            numbers = (f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in _five(values))
            table.add_row(Text(visible(name)), *numbers)
    return table


def _five(values: Quantiles) -> tuple[float, ...]:
    return values.minimum, values.median, values.p90, values.p99, values.maximum


def _counts_table(title: str, counts: Mapping[str, int]) -> Table:
    table = _table(title, "comparisons")
    for name, count in counts.items():
        table.add_row(Text(visible(name) or "(none)"), f"{count:,}")
    return table


def _findings_table(title: str, findings: Sequence[Finding], none: str) -> RenderableType:
    if not findings:
        return Text(f"{title}: {none}.")
    table = _table(title, "rows", "for example")
    table.columns[2].justify = "left"
    for each in findings:
        table.add_row(Text(visible(each.text)), f"{each.count:,}", Text(visible(_short(each.examples))))
    return table


def _short(places: Iterable[str]) -> str:
    """Return places without the folders of their files."""
    return ", ".join(place.rsplit("/", 1)[-1] for place in places)


def _overlap_text(overlap: Overlap) -> Text:
    text = (
        f"Prompts of {overlap.first} that are also in {overlap.second}: {overlap.equal:,} equal, {overlap.near:,} "
        "with 13 words in a row of one."
    )
    for first, second in overlap.examples:
        text += f"\n  {_short([first])} and {_short([second])}"
    return Text(visible(text), style="yellow" if overlap.equal or overlap.near else "")


def _example_text(example: ComparisonExample) -> Text:
    text = Text(
        f"--- {visible(example.where)}{f' ({visible(example.source)})' if example.source else ''}", style="bold"
    )
    for index, reply in enumerate(example.replies):
        rank = "" if reply.rank is None else f", rank {reply.rank:g}"
        text.append(f"\nreply {index + 1}{rank}: ", style="bold")
        if reply.error is not None:
            text.append(visible(reply.error), style="red")
        else:
            text.append_text(_tokens_text(reply))
    return text


def _tokens_text(reply: RenderedReply) -> Text:
    """Return the tokens, divided by `|`; the reply begins at `>>`, and `[[ ]]` are around a token that is read."""
    text = Text(style="not bold")
    count = len(reply.tokens)
    start = count if reply.reply_start is None else reply.reply_start
    shown = {*_ends(0, start), *_ends(start, count), *reply.read}
    left_out = 0
    for index, token in enumerate(reply.tokens):
        if index not in shown:
            left_out += 1
            continue
        if left_out:
            text.append(f" ... {left_out} tokens ... ", style="dim italic")
            left_out = 0
        if index == reply.reply_start:
            text.append(">>", style="bold green")
        piece = visible(token).replace("\n", "\\n")
        if index in reply.read:
            text.append(f"[[{piece}]]", style="bold reverse")
        else:
            text.append(piece, style="green" if index >= start else "dim")
        text.append("|", style="dim")
    return text


def _ends(start: int, stop: int) -> set[int]:
    """Return the first and the last positions of a part."""
    return {*range(start, min(stop, start + SHOWN_BEFORE)), *range(max(start, stop - SHOWN_AFTER), stop)}


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column(title)
    for column in columns:
        table.add_column(column, justify="right")
    return table
