"""Settings of the site; ``make docs`` builds it, offline and with warnings as errors."""

import contextlib
import io
import os
import posixpath
import re
from importlib.metadata import version as version_of
from typing import Any

from flower_blsgd.cli.main import COMMANDS, main

SOURCE = "https://github.com/flower-blsgd/flower-blsgd/blob/main"
"""Where files of the repository that are not pages are shown."""

project = "flower-blsgd"
author = copyright = "The flower-blsgd authors"
version = release = version_of(project)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["results"]
myst_heading_anchors = 4
myst_disable_syntax = ["myst_line_comment"]  # a line may begin with a percent sign
highlight_language = "text"
default_role = "py:obj"
smartquotes = False

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have the types
autodoc_mock_imports = ["lightning", "transformers"]  # extras
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False

html_theme = "furo"
html_title = "flower-blsgd"
html_copy_source = False
html_theme_options = {"source_view_link": f"{SOURCE}/docs/{{filename}}"}

_LINK = re.compile(r"(?<!!)(\[[^]]*\]\()(\.\./[^)#\s]*)")


def point_to_repository(app: Any, page: str, source: list[str]) -> None:
    """Let links that leave docs/, such as ``../../examples``, point to the repository."""

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), match[2]))
        leaves = not path.startswith("docs/") or path.startswith("docs/results/")
        return f"{match[1]}{SOURCE}/{path}" if leaves else match[0]

    source[0] = _LINK.sub(target, source[0])


def insert_help(app: Any, page: str, source: list[str]) -> None:
    """Put the ``--help`` of every command into the page of the command line."""
    if page == "reference/command-line":
        shown = []
        for command in COMMANDS:
            text = io.StringIO()
            with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
                main([command, "--help"])
            shown.append(f"## blsgd {command}\n\n```\n{text.getvalue().strip()}\n```\n")
        source[0] = source[0].partition("<!--")[0] + "\n".join(shown)


def setup(app: Any) -> None:
    """Connect to Sphinx."""
    os.environ["COLUMNS"] = "88"
    app.connect("source-read", point_to_repository)
    app.connect("source-read", insert_help)
