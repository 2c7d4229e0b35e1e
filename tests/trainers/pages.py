"""The code of the pages of `docs/adapters`, as modules."""

import importlib.util
import sys

from tests.adapters.test_pages import blocks


def module_of_page(name, folder, languages=("python",)):
    """Run the code of a page, or of a section of `others.md`, and return it as a module.

    Args:
        name: the name of the page, or of the section as in `test_pages.LIBRARIES`.
        folder: where its file is written.
        languages: marks of the blocks that are run; those with `py` need more than the library.
    """
    path = folder / f"page_of_{name}.py"
    path.write_text("\n".join(block for language in languages for block in blocks(name, language)))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # where pickle looks for its functions
    spec.loader.exec_module(module)
    return module


def fails(conversations):
    """Score the length of the reply; a reply with FAIL has no score."""
    replies = [conversation[-1]["content"] for conversation in conversations]
    return [None if "FAIL" in reply else len(reply) / 4 for reply in replies]


QUESTION = {"role": "user", "content": "What is the highest of 33, 71 and 12?"}
REPLIES = ["It is 12.", "The highest is 71.", "FAIL", "I do not know."]


def said(*replies):
    """Return a conversation for each reply to the question."""
    return [[QUESTION, {"role": "assistant", "content": reply}] for reply in replies]
