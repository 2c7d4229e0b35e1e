"""The site: `make docs` builds docs/_build/html, and a warning is an error."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import gym_rm

project = "gym-rm"
author = "the contributors of gym-rm"
copyright = f"2026, {author}"
version = release = gym_rm.__version__
repository = "https://github.com/gym-rm/gym-rm"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "gym_rm_pages",
    "gym_rm_reference",
]
exclude_patterns = ["_build"]
included_pages = {
    "benchmarks/README.md": "measurements",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security",
    "LICENSE": "",
}

smartquotes_action = "D"  # dashes; quotes stay, because values are quoted
highlight_language = "text"
html_theme = "furo"
html_title = f"gym-rm {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "source_repository": repository,
    "source_branch": "main",
    "source_directory": "docs/",
    "top_of_page_buttons": ["view", "edit"],
}
pygments_style, pygments_dark_style = "friendly", "monokai"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
autodoc_mock_imports = [
    "ray",
    "stable_baselines3",
    "torchrl",
    "trl",
    "tensordict",
    "fastapi",
    "httpx",
    "prometheus_client",
    "starlette",
]
autodoc_type_aliases = {"Conversation": "Conversation", "Prompts": "Prompts", "ScorerLike": "ScorerLike"}
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the signature has the types
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
default_role = "code-or-name"

nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!gym_rm\.).*"),  # names of other packages: an inventory of theirs needs a network
    ("py:obj", ".*"),  # code in docstrings; a link where the name is listed
    (
        "py:class",
        r"gym_rm\.(engine|sandbox|planning\.(request_settings|quantities)|policy\.grpo_settings|lora_settings)\..*",
    ),
    ("py:class", r"gym_rm\.envs\.(infos|single|numeric_views|flights)\.(EnvState|SingleEnv|NumericView|Flight)"),
]

linkcheck_ignore = [r"http://(127\.0\.0\.1|localhost).*", rf"{repository}/.*"]
