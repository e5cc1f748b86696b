"""The two lines that put an app on the stream; this one is the ServerApp's."""

import contextlib
from collections.abc import Iterator
from typing import Literal, cast, get_args

from flwr.app import Context
from flwr.serverapp import Grid

from ...errors import UsageError
from ..flower_internals import add_exit_handler, is_deployment
from .grid import StreamGrid
from .wire_dtype import WireDtype

Transport = Literal["auto", "stream", "messages"]


@contextlib.contextmanager
def stream(
    grid: Grid,
    context: Context,
    transport: Transport | None = None,
    address: str | None = None,
    wire_dtype: WireDtype | None = None,
) -> Iterator[Grid]:
    """Give a ServerApp a fast grid while the ``with`` block runs.

    Parameters
    ----------
    grid, context
        What Flower gave the ServerApp.
    transport : {"auto", "stream", "messages"}, optional
        ``"auto"`` streams on a deployment and leaves every other grid as it is; ``"messages"``
        always does; ``"stream"`` refuses other grids. None reads the run config's ``transport``,
        else ``"auto"``.
    address : str, optional
        As for `StreamGrid`. None reads the run config's ``stream-address``.
    wire_dtype : {"float32", "bfloat16", "float16"}, optional
        As for `StreamGrid`. None reads the run config's ``wire-dtype``.

    Yields
    ------
    Grid
        The fast grid, or the one given.

    Raises
    ------
    UsageError
        If `transport` is not known or does not fit the grid, or the address cannot be used.

    Examples
    --------
    ::

        @app.main()
        def main(grid, context):
            with flower_blsgd.stream(grid, context) as fast:
                strategy.start(fast, initial_arrays)
    """
    settings = context.run_config
    if transport is None:
        transport = cast(Transport, settings.get("transport", "auto"))
    if address is None:
        address = str(settings.get("stream-address", ""))
    if wire_dtype is None:
        wire_dtype = cast(WireDtype, settings.get("wire-dtype", "float32"))
    if transport not in get_args(Transport):
        raise UsageError(f'transport = "{transport}"; use "auto", "stream" or "messages"')
    if wire_dtype not in get_args(WireDtype):
        raise UsageError(f'wire-dtype = "{wire_dtype}"; use "float32", "bfloat16" or "float16"')
    if transport == "stream" and not is_deployment(grid):
        raise UsageError(
            f'transport = "stream" needs a SuperLink and SuperNodes, and this is a '
            f'{type(grid).__name__}; use "auto"'
        )
    if transport == "messages" or not is_deployment(grid):
        yield grid
        return
    with StreamGrid(grid, address, wire_dtype) as fast:
        # A stopped run does not reach the end of this block.
        add_exit_handler(fast.end_at_once)
        fast.wait_until_connected()
        yield fast
