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
nitpicky = True  # a type that no page describes is often a garbled docstring
nitpick_ignore_regex = [
    ("py:(obj|exc)", ".*"),  # also parameters, and names of other modules
    ("py:class", "numpy.ndarray|torch.device"),
]
smartquotes = False

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have the types
autodoc_mock_imports = ["transformers"]  # an extra
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False

html_theme = "furo"
html_title = "flower-blsgd"
html_copy_source = False
html_theme_options = {"source_view_link": f"{SOURCE}/docs/{{filename}}"}

_PAGE = re.compile(r"(?:``)?docs/([\w/-]+)\.md(?:``)?")
_LINK = re.compile(r"(?<!!)(\[[^]]*\]\()(\.\./[^)#\s]*)")


def point_to_repository(app: Any, page: str, source: list[str]) -> None:
    """Let links that leave docs/, such as ``../../examples``, point to the repository."""

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), match[2]))
        leaves = not path.startswith("docs/") or path.startswith("docs/results/")
        return f"{match[1]}{SOURCE}/{path}" if leaves else match[0]

    source[0] = _LINK.sub(target, source[0])


def insert_help(app: Any, page: str, source: list[str]) -> None:
    """Put the ``--help`` of all commands into the page of the command line."""
    if page == "reference/command-line":
        shown = [help_of()]
        shown += [f"## blsgd {command}\n\n{help_of(command)}" for command in COMMANDS]
        source[0] = source[0].partition("<!--")[0] + "\n".join(shown)


def help_of(*words: str) -> str:
    """Return the output of ``--help`` as a block."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return f"```text\n{text.getvalue().strip()}\n```\n"


def link_pages(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Make links of the pages that a docstring names."""
    lines[:] = [_PAGE.sub(r":doc:`/\1`", line) for line in lines]


def tidy_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str | None, Any]:
    """Leave out the arguments that Python gives to a protocol class; name default functions."""
    if signature == "(*args, **kwargs)":
        return "", returns
    return signature and re.sub(r"<function (\w+)>", r"\1", signature), returns


def setup(app: Any) -> None:
    """Connect to Sphinx."""
    os.environ["COLUMNS"] = "88"
    app.connect("source-read", point_to_repository)
    app.connect("source-read", insert_help)
    app.connect("autodoc-process-docstring", link_pages)
    app.connect("autodoc-process-signature", tidy_signature)
