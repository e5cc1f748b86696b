"""Our ServerApp, whose nodes are told to connect to a slow link in front of its port.

A test copies this file into an app's ``server/``, with the port of the link in it. A router that
passes a port on does the same; on one machine both cannot listen on the same port.
"""

from flower_blsgd.runtime.stream.grid import StreamGrid
from server import blsgd_server

LINK_PORT = 0

StreamGrid._addresses = lambda self, address: (f"127.0.0.1:{LINK_PORT}",)  # type: ignore[method-assign]
app = blsgd_server.app
