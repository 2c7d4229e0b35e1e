"""Links of pages that lead out of docs, and names in the API that are written in another way than they are listed."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.roles import XRefRole

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CALL = r"~?[\w.]+\((?:[^()]|\([^()]*\))*\)"
TYPE = r"(?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*?"
READABLE = {
    r"^\(\*args, \*\*kwargs\)$": "",  # of a protocol
    r"TypeAliasForwardRef\('(\w+)'\)": r"\1",
    r"= <(?:[^<>]|<[^<>]*>)*>": "= ...",  # a default that is no expression, such as <factory>
    rf"~?(?:typing\.)?Annotated\[({TYPE})(?:, {CALL})+\]": r"\1",
    r"~?numpy\.ndarray\[tuple\[~?typing\.Any, \.\.\.\], ~?numpy\.dtype\[(~?[\w.]+)\]\]": r"~numpy.typing.NDArray[\1]",
}
NAME = re.compile(r"[A-Za-z_][\w.]*")


def site_links(app: Sphinx, text: str, folder: Path, page: str) -> str:
    """Return the text of a page with links that work on the site.

    Links to files that the site includes lead to their page, links to other files outside of docs to the repository.

    Args:
        app: the build.
        text: the Markdown.
        folder: the folder of the file, from which its links are counted.
        page: the name of the page on the site.
    """
    docs, root = Path(app.srcdir), Path(app.srcdir).parent

    def on_site(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / match[1]))
        if not target.exists() or not target.is_relative_to(root):
            return match[1]  # MyST warns of it
        path = target.relative_to(root).as_posix()
        if included := app.config.included_pages.get(path):
            target = docs / f"{included}.md"
        if target.is_relative_to(docs) and not target.is_dir():
            return os.path.relpath(target, (docs / page).parent)
        return f"{app.config.repository}/{'tree' if target.is_dir() else 'blob'}/main/{path}"

    fenced = [match.span() for match in FENCE.finditer(text)]
    return LINK.sub(
        lambda match: match[0] if any(start < match.start() < end for start, end in fenced) else on_site(match), text
    )


def mend_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Mend the links of a page."""
    source[0] = site_links(app, source[0], (Path(app.srcdir) / page).parent, page)


def mend_included(app: Sphinx, path: Path, parent: str, source: list[str]) -> None:
    """Mend the links of a file that a page at the top of docs includes."""
    source[0] = site_links(app, source[0], (Path(app.srcdir) / path).parent, parent)


def as_restructured_text(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Write the Markdown of a docstring in the other markup: code that ends before a letter (`Prompt`s), and tables."""
    text = re.sub(r"``+[^`]*``+|(`[^`]+`)(?=(\w?))", lambda m: m[0] + ("\\ " if m[2] else ""), "\n".join(lines))
    lines[:] = []
    for line in text.split("\n"):
        if not line.startswith("| "):
            lines.append(line)
        elif not line.startswith("| ---"):
            if not (lines and lines[-1].startswith("     - ")):
                lines += [".. list-table::", "   :header-rows: 1", ""]
            first, *others = (cell.strip() for cell in line.strip("| ").split(" | "))
            lines += [f"   * - {first}", *(f"     - {cell}" for cell in others)]


def readable(app: Sphinx, what: str, name: str, obj: Any, options: Any, given: str, returned: str) -> Any:
    """Return a signature without what only Python reads."""
    for written, shown in READABLE.items():
        given, returned = (text and re.sub(written, shown, text) for text in (given, returned))
    return given, returned


def code_or_name(name: str, rawtext: str, text: str, *others: Any, **options: Any) -> Any:
    """Read `text` in a docstring as code, which is a link if it is the name of an object of the reference."""
    if NAME.fullmatch(text):
        role = XRefRole(innernodeclass=nodes.literal)
        return role("py:obj", rawtext, text, *others, **options)
    return [nodes.literal(rawtext, text)], []


def add_short_ids(app: Sphinx, doctree: nodes.document) -> None:
    """Give objects the ids that viewcode links back to, which have one prefix for all objects of a file."""
    for signature in doctree.findall(addnodes.desc_signature):
        short = f"gym_rm.{signature.get('fullname')}"
        if signature.get("module") and short not in signature["ids"]:
            signature["ids"].append(short)


def find_elsewhere(app: Sphinx, env: Any, node: Any, content: Any) -> Any:
    """Return the link of a name that the reference lists under another module, such as gym_rm.scores.Scores."""
    if node.get("refdomain") != "py":
        return None
    last = node["reftarget"].rpartition(".")[2]
    domain = env.get_domain("py")
    for full, entry in domain.objects.items():
        if full.rpartition(".")[2] == last and (node["reftype"] in ("class", "obj", "data", "exc", "type")):
            listed = _object(full)
            if listed is not None and (node["reftarget"] == last or _object(node["reftarget"]) is listed):
                return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", full, node, content) or entry
    return None


def _object(full: str) -> Any:
    """Return the class, function or alias at the top of a module by its full name."""
    module, _, name = full.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.add_config_value("included_pages", {}, "env", dict)
    app.add_config_value("repository", "", "env", str)
    app.connect("source-read", mend_page)
    app.connect("include-read", mend_included)
    app.connect("doctree-read", add_short_ids)
    app.connect("missing-reference", find_elsewhere)
    app.connect("autodoc-process-docstring", as_restructured_text)
    app.connect("autodoc-process-signature", readable)
    app.add_role("code-or-name", code_or_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
