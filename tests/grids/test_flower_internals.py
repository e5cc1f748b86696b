"""Contracts: everything private of flwr that we rely on. A release that breaks one fails here."""

import ast
import gc
import inspect
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode, SType
from flwr.serverapp import Grid, ServerApp

from flower_blsgd.grids import array_records, flower_internals
from flower_blsgd.grids.app_call import OUT_OF_MEMORY
from flower_blsgd.grids.flower_internals import (
    CRASHED,
    NODE_GONE,
    NOT_LOADED,
    RAISED,
    SERVER_NODE_ID,
    give_message_id,
    has_no_handler,
    load_app,
    release_records_at_once,
)
from flower_blsgd.grids.local_grid import LocalGrid


def message(node_id: int = 100) -> Message:
    return Message(RecordDict({"c": ConfigRecord({"x": 1})}), node_id, "train", group_id="4")


# --- TaskIdentity ---------------------------------------------------------------------------


@pytest.mark.processes
def test_task_identity_is_needed_and_enough() -> None:
    """Flower refuses a message in a process that is nobody; `become_server` changes that."""
    program = """if True:
        from flwr.app import Message, RecordDict
        from flower_blsgd.grids.flower_internals import become_server
        try:
            Message(RecordDict(), 5, "train")
        except RuntimeError as error:
            print(error)
        become_server(run_id=7)
        m = Message(RecordDict(), 5, "train").metadata
        print(m.run_id, m.src_node_id, m.dst_node_id)
    """
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=250
    )
    refusal, made = done.stdout.splitlines()
    assert "TaskIdentity" in refusal
    assert made == f"7 {SERVER_NODE_ID} 5"


# --- Message: _message_id, pickling, errors -------------------------------------------------


def test_message_id_is_empty_until_given() -> None:
    order = message()
    assert order.metadata.message_id == ""
    assert "_message_id" in order.metadata.__dict__  # the private name that we write
    message_id = give_message_id(order)
    assert order.metadata.message_id == message_id != give_message_id(message())


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
    (folder / "client.py").write_text(
        "from flwr.clientapp import ClientApp\nfrom .helper import NAME\napp = ClientApp()\n"
        "class holder:\n    inner = app\n"
    )
    (folder / "helper.py").write_text("NAME = 'helper'\n")
    (folder / "server.py").write_text(
        "from flwr.serverapp import ServerApp\napp = ServerApp()\nnumber = 3\n"
    )
    (folder / "fails.py").write_text("raise ZeroDivisionError('while importing')\n")
    return tmp_path


def test_load_app_from_a_folder(apps: Path) -> None:
    app = load_app("contract_pkg.client:app", apps, ClientApp)
    assert isinstance(app, ClientApp)
    assert load_app("contract_pkg.client:holder.inner", apps, ClientApp) is app
    assert sys.path[0] == str(apps)
    assert isinstance(load_app("contract_pkg.server:app", apps, ServerApp), ServerApp)
    with pytest.raises(ZeroDivisionError, match="while importing"):
        load_app("contract_pkg.fails:app", apps, ClientApp)


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


# --- arrays and records; see also tests/test_array_records.py --------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3, dtype=np.float32),
        np.array(1.5),
        np.zeros((0, 2), np.int64),
        np.zeros((2, 3), ">f8"),
        np.zeros((1,) * 20, np.float16),
    ],
)
def test_an_array_is_a_header_and_its_elements(array: np.ndarray) -> None:
    """What ``numpy.save`` writes in version 1.0, aligned to 64: `memory_of` looks past it."""
    assert Array(array).stype == SType.NUMPY == array_records._NUMPY
    data = Array(array).data
    header = array_records._header(str(array.dtype), array.shape)
    assert data == header + array.tobytes()
    assert data.startswith(b"\x93NUMPY\x01\x00")
    assert len(header) % 64 == 0


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


# --- the grid's interface -------------------------------------------------------------------


def test_grid_has_the_methods_that_we_write() -> None:
    """A new abstract method of Flower's Grid would make LocalGrid impossible to create."""
    assert set(Grid.__abstractmethods__) == {
        "create_message",
        "get_node_ids",
        "pull_messages",
        "push_messages",
        "run",
        "send_and_receive",
        "set_run",
    }
    for name in ("create_message", "push_messages", "pull_messages", "send_and_receive"):
        theirs = list(inspect.signature(getattr(Grid, name)).parameters)
        assert list(inspect.signature(getattr(LocalGrid, name)).parameters) == theirs


def test_private_parts_of_flower_are_imported_in_one_module_only() -> None:
    internals = Path(inspect.getfile(flower_internals))
    found = []
    for file in sorted(internals.parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if file != internals:
                found += [
                    f"{file.name}: {n}"
                    for n in names
                    if re.match(r"flwr\b(?!\.(app|clientapp|serverapp|simulation)\b)", n)
                ]
    assert found == []
