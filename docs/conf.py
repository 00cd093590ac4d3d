"""How Sphinx builds these pages (`make docs`): Markdown, with reference tables that come from the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reference_tables
from sphinx.ext import napoleon
from sphinx.ext.napoleon.docstring import GoogleDocstring

import lockstep

project = "Lockstep"
author = "The Lockstep authors"
copyright = author
version = release = lockstep.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["reference_tables.py"]
nitpicky = True
nitpick_ignore_regex = [
    # Types of other packages: no inventory of theirs is at hand, since the build runs offline.
    (r"py:.*", r"(torch|numpy|np|collections|pathlib|datetime|logging|os|typing|contextlib|types|functools|tqdm)\b.*"),
    (r"py:.*", r"[A-Z]\w*|Any|None|optional|.*[^\w.].*"),
    (r"py:.*", r"lockstep\.(?!utils\.\w+$)\w+\..*"),
]

# ---------------------------------------------------------------- Markdown

myst_heading_anchors = 4
smartquotes = False  # two dashes begin a flag

# ---------------------------------------------------------------- API reference

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
python_use_unqualified_type_names = True
add_module_names = False
maximum_signature_line_length = 88

# ---------------------------------------------------------------- the look

html_theme = "furo"
html_title = f"Lockstep {release}"
html_static_path = ["_static"]
html_css_files = ["lockstep.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
_SYSTEM_FONTS = {
    "font-stack": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', Ubuntu, 'DejaVu Sans', sans-serif",
    "font-stack--monospace": "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace",
}
html_theme_options = {
    "navigation_with_keys": False,
    "light_css_variables": {**_SYSTEM_FONTS, "color-brand-primary": "#0b5394", "color-brand-content": "#0b5394"},
    "dark_css_variables": {**_SYSTEM_FONTS, "color-brand-primary": "#7fb4e8", "color-brand-content": "#7fb4e8"},
}

# ---------------------------------------------------------------- hooks

_TEST_COMMENT = re.compile(r"^<!--\s*test:.*?-->\n?", re.DOTALL | re.MULTILINE)
_TABLE = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def _read_source(_app: object, _page: str, source: list[str]) -> None:
    """Leave out what steers the tests of the pages, and put in the tables that the code gives."""
    text = _TEST_COMMENT.sub("", source[0])
    source[0] = _TABLE.sub(lambda found: reference_tables.TABLES[found[1]](), text)


def _read_docstring(_app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Google's sections ("Args:") for callables only: the extension takes a colon in an attribute's text for a type."""
    if what not in ("attribute", "property", "data"):
        lines[:] = GoogleDocstring(lines, napoleon.Config(), what=what, name=name, obj=obj, options=options).lines()


def setup(app: object) -> None:
    app.connect("autodoc-process-docstring", _read_docstring)  # type: ignore[attr-defined]
    app.connect("source-read", _read_source)  # type: ignore[attr-defined]
