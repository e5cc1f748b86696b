"""How gRPC is set up at both ends of a stream."""

from collections.abc import Sequence

import grpc

from .credentials import SERVER_NAME
from .frames import LONGEST_MESSAGE_BYTES

METHOD = "Session"
SERVICE = "flower_blsgd.Stream"
NODE_KEY = "node-id"
TOKEN_KEY = "token-bin"

SESSION_ENDED = grpc.StatusCode.ABORTED
"""How a call ends when its session is over; one that breaks is unavailable, or cancelled."""

Options = Sequence[tuple[str, int | str]]

_KEEPALIVE: Options = (
    # A host that vanished without a word is noticed after these two, in any case.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_LIMITS: Options = (
    ("grpc.max_receive_message_length", LONGEST_MESSAGE_BYTES),
    ("grpc.max_send_message_length", LONGEST_MESSAGE_BYTES),
)

SERVER_OPTIONS: Options = (
    *_KEEPALIVE,
    *_LIMITS,
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ("grpc.so_reuseport", 0),  # else two runs would share a port, and each get half
)
CLIENT_OPTIONS: Options = (
    *_KEEPALIVE,
    *_LIMITS,
    ("grpc.ssl_target_name_override", SERVER_NAME),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
