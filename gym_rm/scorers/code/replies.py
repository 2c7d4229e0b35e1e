"""Which part of a reply is code."""

from __future__ import annotations

import ast
import bisect
import builtins
import itertools
import re
import symtable
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MARK = re.compile("(?<!`)<code>")
MOST_TRIALS = 8
MOST_BLOCKS = 100
FENCE = re.compile(r"(?P<before>[^`~]*)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)")
MARGIN = re.compile(r"[ \t>]*(?:(?:[-*+]|\d+[.)])[ \t]+)?")
PYTHON = re.compile(r"\W*(?:python|py|pycon|sage)(?:[\d.]*\b)", re.IGNORECASE)
READS = re.compile(
    r"\binput\(|(?:iter\(|= *)input\b|\bstdin[.)]|(?:\bin|=) *(?:sys\.)?stdin\b|"
    r"\b(?:open|read)\(0\b|/dev/stdin|\bfileinput\b"
)
STATEMENT = re.compile(r"^(?:import |from \w+ import |(?:async )?def |class |@|[A-Za-z_][\w, ]*=)", re.MULTILINE)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)


class Fenced(NamedTuple):
    """A fenced block: the words behind its fence, its code, and the lines of the text from one fence to the other."""

    info: str
    code: str
    lines: range


def fenced_blocks(text: str) -> list[Fenced]:
    """Return the fenced blocks of a text; a block without an end reaches to the end.

    Replies do not keep to CommonMark: a fence may stand behind text, text may stand behind the end of a block, a
    block of Python may begin before the end of another one, and those of lists are indented in every way.
    """
    lines, blocks, opened, margin, start = text.split("\n"), list[Fenced](), None, "", 0
    for number, line in enumerate(lines):
        fence = FENCE.fullmatch(line)
        if fence is None:
            continue
        before, info = fence["before"], fence["info"].strip()
        is_alone, begins = bool(MARGIN.fullmatch(before)), bool(PYTHON.match(info))
        if opened is not None:
            is_end = len(before.expandtabs()) < len(margin) + 4 if is_alone else not info
            if not is_end or not fence["fence"].startswith(opened["fence"]):
                continue
            rest = [] if is_alone else [before]
            blocks.append(_fenced(opened["info"], margin, [*lines[start:number], *rest], start))
        opened = fence if begins or (is_alone and opened is None) else None
        margin, start = before.expandtabs() if is_alone else "", number + 1
    return blocks if opened is None else [*blocks, _fenced(opened["info"], margin, lines[start:], start)]


def _fenced(info: str, margin: str, lines: Sequence[str], start: int) -> Fenced:
    """Return a block without the indentation of its fence, or without the marks of a quotation."""
    indent = "^[ \t]*> ?" if ">" in margin else rf"^[ \t]{{0,{len(margin)}}}"
    code = re.sub(indent, "", "".join(f"{line}\n" for line in lines), flags=re.MULTILINE)
    return Fenced(info.strip(), code, range(start - 1, start + len(lines) + 1))


def tagged_blocks(reply: str) -> list[tuple[int, str]]:
    """Return the line and the code of the `<code>` blocks of a reply without thoughts that begin in no fence."""
    said, blocks, end = reply.replace("\r\n", "\n"), list[tuple[int, str]](), 0
    fenced = {line for block in fenced_blocks(said) for line in block.lines}
    breaks = [match.start() for match in re.finditer("\n", said)]
    for match in MARK.finditer(said):
        line = bisect.bisect_left(breaks, match.start())
        if match.start() < end or line in fenced:
            continue
        closing = itertools.islice(re.compile("</code>").finditer(said, match.end()), MOST_TRIALS)
        ends = [each.start() for each in closing] or [len(said)]
        end = next((each for each in ends if is_python(said[match.end() : each])), ends[0])
        body = said[match.end() : end].strip("\n")
        fences = "" if is_python(body) else "".join(block.code for block in fenced_blocks(body))
        blocks.append((line, fences or body))
    return blocks


def is_python(code: str) -> bool:
    """Return whether a text is a program."""
    return _tree(code) is not None


def _tree(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@dataclass(frozen=True, slots=True)
class Block:
    """Code of a reply: its names at the outermost level, what it uses and lacks, and whether it does something.

    `defines` has the methods of a class `Solution` too. Code that is no program has no names.
    """

    code: str
    is_marked: bool = False
    is_program: bool = False
    does: bool = False
    defines: frozenset[str] = frozenset()
    imports: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()

    @classmethod
    def of(cls, code: str, is_marked: bool = False) -> Block:
        """Return a block of a text: of an interactive session, what was typed."""
        if code.lstrip().startswith(">>>"):
            lines = textwrap.dedent(code).splitlines()
            code = "".join(f"{line[4:]}\n" for line in lines if line.startswith((">>>", "...")))
        tree = _tree(code) or _tree(code := textwrap.dedent(code))
        try:
            tables = [symtable.symtable(code, "<reply>", "exec")]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return cls(code, is_marked)
        if tree is None or _returns(tree.body):
            return cls(code, is_marked)
        names: dict[str, set[str]] = {"defines": set(), "imports": set(), "lacks": set()}
        for table in tables:
            tables += table.get_children()
            for each in table.get_symbols():
                is_own = table is tables[0] or (table.get_name() == "Solution" and not each.is_global())
                is_own = is_own or (each.is_declared_global() and each.is_assigned())
                kind = "imports" if each.is_imported() else "defines" if each.is_assigned() else "lacks"
                if is_own or each.is_global():
                    names[kind if is_own else "lacks"].add(each.get_name())
        names["lacks"] -= names["defines"] | names["imports"] | set(dir(builtins))
        does = bool(tree.body) and not isinstance(tree.body[-1], DEFINITIONS)
        return cls(code, is_marked, True, does, **{kind: frozenset(each) for kind, each in names.items()})

    @property
    def is_body(self) -> bool:
        """Whether it is the body of a function."""
        return not self.is_program and is_python("def f():\n" + indented(self.code))

    def gives(self, name: str) -> bool:
        """Return whether it defines a name, or means to if it is not Python."""
        text = rf"^ *(?:(?:async +)?def|class) +{name}\b|^{name} *[:=]"
        return name in self.defines or (not self.is_program and bool(re.search(text, self.code, re.MULTILINE)))


def _returns(nodes: Iterable[ast.AST]) -> bool:
    """Return whether statements return from a function that is around them."""
    kinds = (ast.stmt, ast.ExceptHandler, ast.match_case)
    inner = [node for node in nodes if isinstance(node, kinds) and not isinstance(node, DEFINITIONS)]
    return any(isinstance(node, ast.Return) or _returns(ast.iter_child_nodes(node)) for node in inner)


def reply_blocks(reply: str) -> list[Block]:
    """Return the last blocks of a reply without thoughts that may be Python: in `<code>` tags and in fences."""
    found = [(line, "python", code) for line, code in tagged_blocks(reply)]
    found += [(each.lines.start, each.info, each.code) for each in fenced_blocks(reply)]
    last = sorted(each for each in found if each[2].strip())[-MOST_BLOCKS:]
    blocks = [(info, Block.of(code, bool(PYTHON.match(info)))) for _, info, code in last]
    return [block for info, block in blocks if block.is_marked or block.defines or not info]


def extract_code(reply: str, *, names: Sequence[str] = ()) -> str | None:
    """Return the solution in a reply without thoughts, or None if it has no code.

    Of several blocks it is the last that defines one of `names`, which the tests need; without names, the last that
    reads the input and prints. The blocks that define what it uses come before it.
    """
    reply = _with_first_fence(reply.replace("\r\n", "\n"))
    if blocks := reply_blocks(reply):
        givers = [block for block in blocks if any(map(block.gives, names))]
        last = givers[-1] if givers else None if names else _reader(blocks)
        if last is None:
            bodies = [block for block in blocks if block.is_body]
            programs = [block for block in blocks if block.defines or "print" in block.code]
            last = (bodies or programs or [block for block in blocks if block.is_marked] or blocks)[-1]
        wanted = last.lacks.union(name for name in names if not last.gives(name))
        return "\n".join([*(each.code for each in _needed(blocks, last, wanted)), last.code])
    if "<answer>" in reply:
        return extract_code(reply.rpartition("<answer>")[2].partition("</answer>")[0], names=names)
    has_code = reply.strip() and not fenced_blocks(reply) and not MARK.search(reply)
    return _without_prose(reply.strip("\n")) if has_code else None


def _without_prose(text: str) -> str:
    """Return a text from its first statement to the end of what is Python; one that has no such part as it is."""
    whole, start = Block.of(text), STATEMENT.search(text)
    lines = text[start.start() :].split("\n") if start and not (whole.is_program or whole.is_body) else []
    for _ in range(MOST_TRIALS):
        try:
            ast.parse("\n".join(lines))
            break
        except SyntaxError as error:
            end = (error.lineno or 1) - 1
            is_prose = not "".join(lines[end : end + 1]).startswith((" ", "\t"))
            lines = lines[:end] if is_prose else []
        except (ValueError, RecursionError, MemoryError):
            return text
    return "\n".join(lines) or whole.code


def _with_first_fence(reply: str) -> str:
    """Return a reply with the fence that its prompt opened, which it only closes."""
    head = re.split(r"(?:^[ \t]*|(?<=\S))```[ \t]*$", reply, maxsplit=1, flags=re.MULTILINE)[0]
    code = Block.of("" if head == reply or fenced_blocks(head) or MARK.search(head) else head)
    is_code = code.is_body or code.defines or code.imports or (READS.search(code.code) and code.is_program)
    return f"```python\n{reply}" if is_code and head.strip() else reply


def _reader(blocks: Sequence[Block]) -> Block | None:
    """Return the last block that reads the input and does something with it, itself or by blocks that it needs."""
    for block in reversed(blocks):
        reads, before = bool(READS.search(block.code)), _needed(blocks, block, block.lacks)
        is_example = not reads and any(each.does for each in before)  # of a program that stands before it
        reads = reads or any(READS.search(each.code) for each in before)
        if reads and not is_example and (block.does or (block.is_marked and not block.is_program)):
            return block
    return None


def _needed(blocks: Sequence[Block], last: Block, names: Iterable[str]) -> list[Block]:
    """Return the other blocks that define these names, and what these lack, in their order."""
    place, found, missing = blocks.index(last), set[int](), [*names]
    while missing:
        name = missing.pop()
        order = [*reversed(range(place)), *range(place + 1, len(blocks))]
        giver = next((k for k in order if name in blocks[k].defines | blocks[k].imports), None)
        if giver is not None and giver not in found:
            found.add(giver)
            missing += blocks[giver].lacks - last.defines - last.imports
    return [blocks[k] for k in sorted(found)]


def indented(body: str) -> str:
    """Indent the body of a function that was written without its indentation, or whose first line lost it."""
    body = re.sub(r"\A(?:\s*\n)+", "", body.expandtabs(4)).rstrip("\n") + "\n"
    if body.startswith("    "):
        return body
    whole = textwrap.indent(body, "    ")
    return whole if is_python("def f():\n" + whole) else "    " + body.lstrip(" ")
