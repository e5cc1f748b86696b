# mypy: implicit-reexport
# ruff: noqa: F401
"""Private parts of Flower that this library uses, and the one class of Flower that it patches.

``tests/grids/test_flower_internals.py`` checks each of them with the installed Flower. Written for
flwr 1.41 and 1.42.
"""

import contextlib
import copy
import functools
import itertools
import re
import sys
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.app.message import make_message
from flwr.app.message.recorddict import _SyncedDict
from flwr.client.mod.utils import make_ffn
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import Array as ProtoArray
from flwr.proto.recorddict_pb2 import ArrayRecord as ProtoArrayRecord
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import exit as flower_exit
from flwr.supercore import object_ref
from flwr.supercore import run as flower_run
from flwr.supercore.task_identity import TaskIdentity

SERVER_NODE_ID = 1
_PROCESS = uuid.uuid4().hex
_numbers = itertools.count(1)

App = TypeVar("App", ClientApp, ServerApp)
Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)
Run = flower_run.Run
add_exit_handler = flower_exit.add_exit_handler

RAISED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
NOT_LOADED = ErrorCode.LOAD_CLIENT_APP_EXCEPTION
CRASHED = ErrorCode.CLIENT_APP_CRASHED
NODE_GONE = ErrorCode.NODE_UNAVAILABLE
LATE = ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE

_NO_HANDLER = re.compile(r"No \w+ function registered")


def has_no_handler(error: Error) -> bool:
    """Return whether a ClientApp has no function for a message: Flower has no code for that."""
    return _NO_HANDLER.search(error.reason or "") is not None


def become_server(run_id: int) -> None:
    """Let this process create messages, which Flower refuses outside its own processes."""
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = SERVER_NODE_ID
    TaskIdentity.task_id = 1


def release_records_at_once() -> None:
    """Patch Flower's `_SyncedDict`, so that arrays are freed with the last reference to them.

    The views that a RecordDict returns (`array_records` and similar) hold a bound method of
    themselves, and the RecordDict. This reference cycle would keep the arrays in use until the
    garbage collector runs, and each round would need another model of shared memory. A subclass
    cannot replace the class: Flower and users create RecordDicts of Flower's own type.
    """
    _SyncedDict.__init__ = _init_without_cycle  # type: ignore[method-assign, assignment]


_init_with_cycle = _SyncedDict.__init__


def _init_without_cycle(records: Any, ref_recorddict: RecordDict, allowed_type: type[Any]) -> None:
    _init_with_cycle(records, ref_recorddict, allowed_type)
    kind: Any = SimpleNamespace(allowed_type=allowed_type)
    records.__dict__["_check_value_fn"] = functools.partial(_SyncedDict.check_value, kind)


def filled_unchecked(record: Record, values: Mapping[str, Any]) -> Record:
    """Put values into a record or a RecordDict without Flower's checks, and return it.

    Flower checks each key and value, which takes most of the time of a message.
    """
    record.__dict__["_data"].update(values)
    return record


def reduced(record: Record) -> tuple[Any, ...]:
    """Return how to pickle a record or a RecordDict: faster than with its functions for checks."""
    return _filled, (type(record), record.__dict__["_data"])


def _filled(kind: type[Record], values: Mapping[str, Any]) -> Record:
    return filled_unchecked(kind(), values)


def empty_run(run_id: int) -> Run:
    """Return the record of a run that no SuperLink knows."""
    return Run.create_empty(run_id)


def give_message_id(message: Message) -> str:
    """Set the id that a SuperLink would set, and return it."""
    message_id = f"{_PROCESS}-{next(_numbers)}"  # a uuid for each would cost a system call
    message.metadata.__dict__["_message_id"] = message_id
    return message_id


def load_app(reference: str, app_dir: Path, kind: type[App]) -> App:
    """Load ``module:attribute`` from an app's folder, as a SuperLink or a SuperNode does."""
    app = object_ref.load_app(reference, ImportError, app_dir)
    if not isinstance(app, kind):
        raise ImportError(f"{reference} is a {type(app).__name__}, not a {kind.__name__}")
    return app


def answer_without_mods(
    app: ClientApp, kind: str, answer: Callable[[Message, Context], Message]
) -> None:
    """Register a handler for a message type that bypasses mods, which expect models in messages.

    ValueError if the app was created with ``client_fn``, which handles every message itself.
    """
    if app._call is not None:
        raise ValueError("a ClientApp made with client_fn cannot serve a stream; use @app.train()")
    app._registered_funcs[kind] = answer


def skip_mods(app: ClientApp, kinds: Collection[str]) -> None:
    """Let an app's functions for message types be called without the mods of users."""
    for kind in app._registered_funcs.keys() & set(kinds):
        function: Any = app._registered_funcs[kind]
        ours = []
        while getattr(function, "__code__", None) is _WITH_MOD:
            function, mod = (cell.cell_contents for cell in function.__closure__)
            if str(getattr(mod, "__module__", "")).startswith("flower_blsgd."):
                ours.append(mod)
        app._registered_funcs[kind] = make_ffn(function, ours)


_WITH_MOD = cast(Any, make_ffn(cast(Any, None), [cast(Any, None)])).__code__
"""The code of a function that Flower has wrapped in a mod."""


def inside_lifespan(app: ClientApp) -> ClientApp:
    """Return the app for calls within its lifespan, which do not enter the lifespan again."""
    inner = copy.copy(app)
    inner._lifespan = contextlib.nullcontext  # type: ignore[assignment]
    return inner


def is_deployment(grid: Grid) -> bool:
    """Return whether a grid sends messages through a SuperLink to SuperNodes."""
    # Importing the module takes seconds. If it is not imported yet, there is no such grid.
    module = sys.modules.get("flwr.superlink.grid.http_grid")
    return module is not None and isinstance(grid, module.HttpGrid)


def superlink_of(grid: Grid) -> str:
    """Return the address of a deployment's SuperLink as this process reaches it; else empty."""
    return str(cast(Any, grid)._addr) if is_deployment(grid) else ""
