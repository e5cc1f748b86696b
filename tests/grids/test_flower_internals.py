"""Contracts: everything private of flwr that we rely on. A release that breaks one fails here."""

import ast
import gc
import inspect
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import ServerApp

from flower_blsgd.flower import internals
from flower_blsgd.flower.app_call import OUT_OF_MEMORY
from flower_blsgd.flower.internals import (
    CRASHED,
    NODE_GONE,
    NOT_LOADED,
    RAISED,
    has_no_handler,
    load_app,
    release_records_at_once,
)


def message(node_id: int = 100) -> Message:
    return Message(RecordDict({"c": ConfigRecord({"x": 1})}), node_id, "train", group_id="4")


# --- errors ---------------------------------------------------------------------------------


def test_error_codes() -> None:
    """The numbers are on the wire: BiasedLocalSGD tells by them what became of an order."""
    assert ErrorCode.LOAD_CLIENT_APP_EXCEPTION == NOT_LOADED == 1
    assert ErrorCode.CLIENT_APP_RAISED_EXCEPTION == RAISED == 2
    assert ErrorCode.NODE_UNAVAILABLE == NODE_GONE == 5
    assert ErrorCode.CLIENT_APP_CRASHED == CRASHED == 8
    assert max(v for k, v in vars(ErrorCode).items() if k.isupper()) < OUT_OF_MEMORY
    assert not has_no_handler(Error(RAISED))


def test_message_without_a_handler_is_known_by_its_error() -> None:
    with pytest.raises(ValueError, match="No train function") as refused:
        ClientApp()(message(), Context(1, 100, {}, RecordDict(), {}))
    assert has_no_handler(Error(RAISED, str(refused.value)))


# --- load_app -------------------------------------------------------------------------------


@pytest.fixture
def apps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with apps; what they leave in sys.path and sys.modules is taken away."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    folder = tmp_path / "contract_pkg"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for name in ("Client", "Server"):
        text = f"from flwr.{name.lower()}app import {name}App\napp = {name}App()\n"
        (folder / f"{name.lower()}.py").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "reference", "reason"),
    [
        (ClientApp, "contract_pkg.server:app", "is a ServerApp, not a ClientApp"),
        (ServerApp, "contract_pkg.client:app", "is a ClientApp, not a ServerApp"),
        (ClientApp, "contract_pkg.client:missing", "missing"),
        (ClientApp, "no_such_contract_pkg:app", "no_such_contract_pkg"),
        (ClientApp, "contract_pkg.client", "contract_pkg.client"),
    ],
)
def test_load_app_that_is_not_there_or_of_another_kind(
    apps: Path, kind: type[Any], reference: str, reason: str
) -> None:
    with pytest.raises(ImportError, match=reason):
        load_app(reference, apps, kind)


# --- records --------------------------------------------------------------------------------


def test_records_by_kind_do_not_keep_arrays_from_being_freed() -> None:
    """Flower's refer to themselves: only the garbage collector would end them."""
    release_records_at_once()
    gc.collect()
    gc.disable()
    try:
        content = RecordDict({"a": ArrayRecord({"w": Array(np.ones(2))})})
        array = weakref.ref(content["a"]["w"])
        found = content.array_records
        assert list(found) == ["a"]
        assert content.config_records.get("c") is None
        assert len(content.metric_records) == 0
        del found, content
        assert array() is None
    finally:
        gc.enable()


def test_records_by_kind_still_check_and_write_through() -> None:
    release_records_at_once()
    release_records_at_once()
    content = RecordDict({"a": ArrayRecord()})
    with pytest.raises(TypeError, match="Expected `ArrayRecord`, but received `ConfigRecord`"):
        content.array_records["b"] = ConfigRecord()  # type: ignore[assignment]
    with pytest.raises(TypeError):
        content.array_records[3] = ArrayRecord()  # type: ignore[index]
    content.array_records["b"] = ArrayRecord()
    content.config_records["c"] = ConfigRecord({"x": 1})
    del content.array_records["a"]
    assert list(content) == ["b", "c"]


# --- imports --------------------------------------------------------------------------------


def test_private_parts_of_flower_are_imported_in_one_module_only() -> None:
    module = Path(inspect.getfile(internals))
    found = []
    for file in sorted(module.parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if file != module:
                found += [
                    f"{file.name}: {n}"
                    for n in names
                    if re.match(r"flwr\b(?!\.(app|clientapp|serverapp|simulation)\b)", n)
                ]
    assert found == []
