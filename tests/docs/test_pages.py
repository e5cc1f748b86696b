"""The pages: links lead somewhere, code is real, and every public name is described."""

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.serverapp.strategy import FedAvg
from markdown_it import MarkdownIt
from markdown_it.token import Token

import flower_blsgd
from flower_blsgd.algorithm.sampling_stats import SamplingStats
from flower_blsgd.cli.main import COMMANDS
from flower_blsgd.config import RunConfig
from flower_blsgd.results.folder import EpochRow
from flower_blsgd.strategy.round_metrics import RoundRecord, WorkerRound

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for folder in (".", "docs", "examples", "clients", "server", "benchmarks")
    for page in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
    if "_build" not in page.parts
)
ids = [str(page.relative_to(ROOT)) for page in PAGES]
DOCS = [page for page in PAGES if (ROOT / "docs") in page.parents or page == ROOT / "README.md"]


def tokens_of(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def links_of(page: Path) -> Iterator[str]:
    for token in tokens_of(page):
        for child in token.children or ():
            for attribute in ("href", "src"):
                if link := child.attrGet(attribute):
                    yield str(link)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of headings, as GitHub and MyST make them."""
    tokens = tokens_of(page)
    titles = [
        "".join(child.content for child in heading.children or ())
        for before, heading in itertools.pairwise(tokens)
        if before.type == "heading_open"
    ]
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def blocks() -> Iterator[tuple[str, str, str]]:
    """Yield page, language and text of every block of code."""
    for page in DOCS:
        for token in tokens_of(page):
            if token.type == "fence":
                yield str(page.relative_to(ROOT)), token.info.strip(), token.content


def names_used(tree: ast.AST) -> Iterator[str]:
    """Yield the names of this library that a program uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "flower_blsgd":
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "flower_blsgd":
            yield from (alias.name for alias in node.names)


OWNERS = {
    "": flower_blsgd,
    "flower_blsgd": flower_blsgd,
    "session": flower_blsgd.Session,
    "strategy": flower_blsgd.BiasedLocalSGD,
}
"""What the names of the pages are, as far as calls are checked."""


def calls_of(tree: ast.AST) -> Iterator[tuple[str, set[str], set[str]]]:
    """Yield the name, the keyword arguments and the accepted ones of calls of this library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            if owner not in OWNERS or (not owner and name not in flower_blsgd.__all__):
                continue
            parameters = inspect.signature(getattr(OWNERS[owner], name)).parameters
            accepted = set(parameters)
            if "settings" in parameters:
                accepted |= {field.name for field in dataclasses.fields(RunConfig)}
            if "fedavg_arguments" in parameters:
                accepted |= inspect.signature(FedAvg).parameters.keys()
            if name == "start":  # which passes the others on
                accepted |= inspect.signature(FedAvg.start).parameters.keys()
            yield name, {keyword.arg for keyword in node.keywords if keyword.arg}, accepted


def test_python_is_valid_and_uses_names_that_exist() -> None:
    found = 0
    for page, language, text in blocks():
        if language == "python":
            tree = ast.parse(text, page)
            for name in names_used(tree):
                known = name in flower_blsgd.__all__
                assert known or importlib.import_module(f"flower_blsgd.{name}"), (page, name)
            for name, given, accepted in calls_of(tree):
                assert given <= accepted, (page, name)
                found += 1
    assert found > 20


def test_every_block_has_a_language_that_is_checked_here_or_none() -> None:
    for page, language, text in blocks():
        known = language in {"python", "bash", "diff", "text"} or language.startswith("{")
        assert known, (page, language, text)


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the page and the words of every command line of `blsgd`."""
    for page, language, text in blocks():
        if language == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(re.sub(r"\$\w+/", "", line.partition("  #")[0]))
                for at, word in enumerate(words):
                    if Path(word).name == "blsgd" and at + 1 < len(words):
                        yield page, words[at + 1 :]


def test_commands_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ca.crt", "node-1"):  # files that options name
        (tmp_path / name).touch()
    keys = {field.name.replace("_", "-") for field in dataclasses.fields(RunConfig)}
    found = 0
    for page, words in commands():
        found += 1
        assert words[0] in COMMANDS or words[0].startswith("-"), (page, words)
        parse(words)
        for key in (b.partition("=")[0] for a, b in itertools.pairwise(words) if a == "-s"):
            assert key in keys, (page, words)
    assert found > 20


def parse(words: list[str]) -> None:
    from flower_blsgd.cli.main import _parser

    _parser(words).parse_args(words)


def test_every_public_name_is_in_the_reference() -> None:
    pages = (ROOT / "docs/reference/api").glob("*.md")
    text = "\n".join(page.read_text() for page in pages)
    described = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", text, re.MULTILINE)
    own = [name for name in described if "." not in name]
    assert sorted(own) == sorted(flower_blsgd.__all__)
    index = (ROOT / "docs/reference/api/index.md").read_text()
    assert set(own) <= set(re.findall(r"`(\w+)`", index))


def test_sidebar_has_every_page() -> None:
    docs = ROOT / "docs"
    listed = (docs / "index.md").read_text().splitlines()
    for page in (str(page.relative_to(docs)) for page in PAGES if docs in page.parents):
        if page != "index.md" and not page.startswith(("results/", "reference/api/")):
            assert page.removesuffix(".md") in listed, page


def test_code_names_pages_that_exist() -> None:
    found = 0
    for folder in ("flower_blsgd", "scripts", "examples", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text()):
                assert (ROOT / page).exists(), (path, page)
                found += 1
    assert found > 10


def test_every_column_of_a_results_folder_is_described() -> None:
    text = (ROOT / "docs/reference/results-folder.md").read_text()
    for record in (RoundRecord, WorkerRound, EpochRow, SamplingStats):
        for field in dataclasses.fields(record):
            assert f"`{field.name}`" in text or field.name == "sampling", field.name


def test_the_page_on_stability_names_what_is_provisional() -> None:
    page = (ROOT / "docs" / "reference" / "stability.md").read_text()
    (line,) = re.findall(r"^\| provisional .*$", page, re.MULTILINE)
    docs = {name: getattr(flower_blsgd, name).__doc__ or "" for name in flower_blsgd.__all__}
    provisional = {name for name, text in docs.items() if "Provisional: may change" in text}
    settings = {field.name for field in dataclasses.fields(RunConfig)}
    assert provisional == set(re.findall(r"`(\w+)`", line)) - settings
