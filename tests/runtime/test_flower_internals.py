"""Contracts: everything private of flwr that we rely on. A release that breaks one fails here."""

import ast
import gc
import inspect
import io
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode, SType
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.object_ref import load_app
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from flower_blsgd import array_view
from flower_blsgd.runtime import array_memory, flower_internals, shared_arrays
from flower_blsgd.runtime.flower_internals import (
    CRASHED,
    NODE_GONE,
    NOT_LOADED,
    RAISED,
    SERVER_NODE_ID,
    become_server,
    empty_run,
    give_message_id,
    load_client_app,
    load_server_app,
    release_records_at_once,
)
from flower_blsgd.runtime.local_grid import LocalGrid

PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation")


def message(node_id: int = 100) -> Message:
    return Message(RecordDict({"c": ConfigRecord({"x": 1})}), node_id, "train", group_id="4")


# --- TaskIdentity ---------------------------------------------------------------------------


@pytest.mark.processes
def test_task_identity_is_needed_and_enough() -> None:
    """Flower refuses a message in a process that is nobody; `become_server` changes that."""
    program = """if True:
        from flwr.app import Message, RecordDict
        from flower_blsgd.runtime.flower_internals import become_server
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


def test_task_identity_is_what_messages_carry() -> None:
    become_server(run_id=31)
    assert (TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id) == (31, 1, 1)
    assert message().metadata.run_id == 31
    assert message().metadata.src_node_id == SERVER_NODE_ID == 1


def test_task_identity_is_not_needed_for_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process is nobody, and answers all the same."""
    order = message()
    give_message_id(order)
    for name in ("_run_id", "_node_id", "_task_id"):
        assert hasattr(TaskIdentity, name)
        monkeypatch.setattr(TaskIdentity, name, None)
    for reply in (
        Message(RecordDict(), reply_to=order),
        Message(Error(RAISED, "why"), reply_to=order),
    ):
        assert reply.metadata.reply_to_message_id == order.metadata.message_id
        assert (reply.metadata.src_node_id, reply.metadata.dst_node_id) == (100, SERVER_NODE_ID)
        assert reply.metadata.group_id == "4"
        assert reply.metadata.message_type == "train"


# --- Run.create_empty -----------------------------------------------------------------------


def test_run_create_empty() -> None:
    run = empty_run(9)
    assert isinstance(run, Run)
    assert run.run_id == 9
    assert (run.fab_id, run.fab_version, run.fab_hash) == ("", "", "")
    assert dict(run.override_config) == {}


# --- Message: _message_id, pickling, errors -------------------------------------------------


def test_message_id_is_empty_until_given() -> None:
    order = message()
    assert order.metadata.message_id == ""
    assert "_message_id" in order.metadata.__dict__  # the private name that we write
    message_id = give_message_id(order)
    assert message_id
    assert order.metadata.message_id == message_id


def test_message_ids_differ() -> None:
    assert len({give_message_id(message()) for _ in range(100)}) == 100


def test_message_survives_pickling() -> None:
    """Orders and replies go through a pipe to our own processes."""
    order = message()
    order.content["a"] = ArrayRecord({"w": Array(np.arange(4, dtype=np.float32))})
    message_id = give_message_id(order)
    copy = pickle.loads(pickle.dumps(order))
    assert copy.metadata.message_id == message_id
    assert copy.metadata.dst_node_id == 100
    assert copy.content["c"] == ConfigRecord({"x": 1})
    np.testing.assert_array_equal(copy.content["a"]["w"].numpy(), [0, 1, 2, 3])
    error = pickle.loads(pickle.dumps(Message(Error(CRASHED, "died"), reply_to=copy)))
    assert error.has_error()
    assert (error.error.code, error.error.reason) == (CRASHED, "died")
    assert error.metadata.reply_to_message_id == message_id


def test_context_survives_pickling() -> None:
    context = Context(1, 100, {"partition-id": 0}, RecordDict(), {"lr": 0.5})
    copy = pickle.loads(pickle.dumps(context))
    assert (copy.run_id, copy.node_id) == (1, 100)
    assert dict(copy.node_config) == {"partition-id": 0}
    assert dict(copy.run_config) == {"lr": 0.5}
    copy.state = RecordDict({"c": ConfigRecord({"x": 2})})
    assert copy.state["c"]["x"] == 2


def test_error_codes() -> None:
    """The numbers are on the wire: BiasedLocalSGD tells by them what became of an order."""
    assert ErrorCode.LOAD_CLIENT_APP_EXCEPTION == NOT_LOADED == 1
    assert ErrorCode.CLIENT_APP_RAISED_EXCEPTION == RAISED == 2
    assert ErrorCode.NODE_UNAVAILABLE == NODE_GONE == 5
    assert ErrorCode.CLIENT_APP_CRASHED == CRASHED == 8


# --- ClientApp as a function ----------------------------------------------------------------


def test_client_app_is_called_with_message_and_context() -> None:
    app = ClientApp()

    @app.query("profile")
    def profile(order: Message, context: Context) -> Message:
        context.state["seen"] = ConfigRecord({"by": context.node_id})
        return Message(order.content, reply_to=order)

    context = Context(1, 100, {}, RecordDict(), {})
    order = Message(RecordDict({"c": ConfigRecord({"x": 5})}), 100, "query.profile")
    assert app(order, context).content["c"]["x"] == 5
    assert context.state["seen"]["by"] == 100


def test_client_app_without_the_handler_raises_words_that_the_roster_knows() -> None:
    context = Context(1, 100, {}, RecordDict(), {})
    order = Message(RecordDict(), 100, "query.profile")
    with pytest.raises(ValueError, match="No query function registered with name 'profile'"):
        ClientApp()(order, context)


def test_server_app_is_called_with_grid_and_context() -> None:
    app = ServerApp()
    seen = []

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        seen.append((grid, context.run_config["lr"]))

    grid = LocalGrid([], "no:app", Path(), {})
    app(grid, Context(1, SERVER_NODE_ID, {}, RecordDict(), {"lr": 0.5}))
    assert seen == [(grid, 0.5)]


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


def test_load_app_takes_reference_error_and_folder() -> None:
    assert list(inspect.signature(load_app).parameters) == [
        "module_attribute_str",
        "error_type",
        "project_dir",
    ]


def test_load_client_app_from_a_folder(apps: Path) -> None:
    app = load_client_app("contract_pkg.client:app", apps)
    assert isinstance(app, ClientApp)
    assert load_client_app("contract_pkg.client:holder.inner", apps) is app
    assert sys.path[0] == str(apps)


def test_load_server_app_from_a_folder(apps: Path) -> None:
    assert isinstance(load_server_app("contract_pkg.server:app", apps), ServerApp)


@pytest.mark.parametrize(
    ("load", "reference", "reason"),
    [
        (load_client_app, "contract_pkg.server:app", "is a ServerApp, not a ClientApp"),
        (load_server_app, "contract_pkg.client:app", "is a ClientApp, not a ServerApp"),
        (load_client_app, "contract_pkg.server:number", "is a int, not a ClientApp"),
    ],
)
def test_load_app_of_the_wrong_kind(
    apps: Path, load: Callable[[str, Path], object], reference: str, reason: str
) -> None:
    with pytest.raises(ImportError, match=f"{reference} {reason}"):
        load(reference, apps)


@pytest.mark.parametrize(
    "reference",
    [
        "contract_pkg.client:missing",
        "contract_pkg.no_such_module:app",
        "no_such_contract_pkg:app",
        "contract_pkg.client",
        ":app",
    ],
)
def test_load_app_that_is_not_there(apps: Path, reference: str) -> None:
    with pytest.raises(ImportError):
        load_client_app(reference, apps)


def test_load_app_lets_the_apps_own_error_through(apps: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="while importing"):
        load_client_app("contract_pkg.fails:app", apps)


# --- arrays: what array_view and shared_arrays rely on ----------------------------------------


def test_array_keeps_these_fields_in_its_dict() -> None:
    """A view of ours writes them there itself, past what Array's constructor does."""
    array = Array(np.arange(3, dtype=np.int16))
    assert {"dtype", "shape", "stype", "data"} <= array.__dict__.keys()
    assert {name for name in array.__dict__ if not name.startswith("_")} == {
        "dtype",
        "shape",
        "stype",
        "data",
    }
    assert (array.dtype, array.shape, array.stype) == ("int16", (3,), "numpy.ndarray")
    assert type(array.stype) is str
    assert SType.NUMPY == array.stype == array_view._NUMPY


def test_array_reads_its_bytes_through_the_attribute_data() -> None:
    """So a property of that name is enough for `numpy`, the wire and `count_bytes`."""

    class Told(Array):
        def __init__(self) -> None:
            self.__dict__.update(dtype="int64", shape=(2,), stype="numpy.ndarray")

        @property
        def data(self) -> bytes:  # type: ignore[override]
            return Array(np.array([1, 2])).data

    told = Told()
    assert told.numpy().tolist() == [1, 2]
    assert list(told.children) == list(Array(np.array([1, 2])).children)
    record = ArrayRecord()
    record["x"] = told
    assert record.count_bytes() == ArrayRecord({"x": Array(np.array([1, 2]))}).count_bytes()


def test_array_has_a_name_on_the_wire_that_is_its_classs() -> None:
    assert Array(np.ones(1)).deflate().startswith(b"Array ")


def test_array_can_be_made_of_its_four_fields_in_this_order() -> None:
    array = Array(np.arange(3.0))
    assert Array(array.dtype, array.shape, array.stype, array.data) == array


def test_array_record_keeps_its_arrays_in_data_of_its_dict() -> None:
    array = Array(np.ones(1))
    record = ArrayRecord()
    assert record.__dict__["_data"] == {}
    record["x"] = array
    assert list(record.__dict__["_data"].items()) == [("x", array)]
    assert record["x"] is array
    record.__dict__["_data"]["y"] = array
    assert record["y"] is array
    filled = ArrayRecord()
    filled.__dict__["_data"].update({"x": array})
    assert filled.object_id == ArrayRecord({"x": array}).object_id


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3, dtype=np.float32),
        np.array(1.5),
        np.zeros((0, 2), np.int64),
        np.array([True]),
        np.zeros((2, 3), ">f8"),
        np.zeros((1,) * 20, np.float16),
        np.zeros((10_000, 2), np.uint8),
    ],
)
def test_an_array_is_a_header_and_its_elements(array: np.ndarray) -> None:
    """What ``numpy.save`` writes in version 1.0, aligned to 64: `shared_arrays` looks past it."""
    data = Array(array).data
    header = array_memory._header(str(array.dtype), array.shape)
    assert data == header + array.tobytes()
    assert data.startswith(b"\x93NUMPY\x01\x00")
    assert len(header) % 64 == 0


def test_message_is_pickled_with_its_records_as_they_are() -> None:
    """A pickler meets every ArrayRecord of a message as an object of this very class."""
    order = message()
    order.content["a"] = ArrayRecord({"w": Array(np.ones(2))})
    order.content["b"] = ArrayRecord({"w": Array(np.zeros(2))})
    met: list[object] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, content: object) -> object:
            if type(content) is ArrayRecord:
                met.append(content)
                return len(met) - 1
            return None

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: int) -> object:
            return met[number]

    buffer = io.BytesIO()
    Pickler(buffer).dump(order)
    buffer.seek(0)
    copy = Unpickler(buffer).load()
    assert [id(record) for record in met] == [id(order.content["a"]), id(order.content["b"])]
    assert list(copy.content) == ["c", "a", "b"]
    assert copy.content["b"] is order.content["b"]
    assert copy.content.array_records["a"]["w"].numpy().tolist() == [1.0, 1.0]


def test_client_app_takes_attributes() -> None:
    app = ClientApp()
    assert not shared_arrays.takes_views(app)
    shared_arrays.accept_views(app)
    assert shared_arrays.takes_views(app)
    assert not shared_arrays.takes_views(ClientApp())


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


def test_private_parts_of_flower_are_used_in_one_module_only() -> None:
    """DESIGN section 2: everything private of flwr that is needed, once."""
    internals = Path(inspect.getfile(flower_internals))
    found = []
    for file in sorted(internals.parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [
                f"{file.name} imports {name}"
                for name in names
                if name.split(".")[0] == "flwr"
                and not any(name == p or name.startswith(p + ".") for p in PUBLIC)
                and file != internals
            ]
    assert found == []
