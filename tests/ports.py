"""A port for a run on this host."""

import atexit
import socket


def free_port():
    """Return a port that nothing else is given while this process lives.

    It stays bound here, and nothing listens on it: who binds it with SO_REUSEADDR, as torch's stores do, may listen.
    Source: socket(7).
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    atexit.register(held.close)
    return int(held.getsockname()[1])
