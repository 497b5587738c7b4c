"""Whether the head of a Ray cluster is where an address says, found out in seconds.

Ray's own attempt to connect takes half a minute where nobody is, and minutes where something else
listens.
"""

from __future__ import annotations

import socket

# What opens an HTTP/2 connection (RFC 9113, 3.4): the client's preface and empty SETTINGS. A gRPC
# server, as Ray's head is one, answers with SETTINGS of its own.
_OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME_HEADER, _TYPE, _SETTINGS = 9, 3, 4


def no_head(host: str, port: int, *, seconds: float) -> str:
    """Why no cluster's head can be there; empty when one may be. seconds: for each answer."""
    try:
        with socket.create_connection((host, port), timeout=seconds) as connection:
            connection.sendall(_OPENING)
            answer = connection.recv(_FRAME_HEADER, socket.MSG_WAITALL)
    except TimeoutError:
        return f"no answer in {seconds:.0f} s"
    except ConnectionResetError:
        answer = b""
    except OSError as error:
        return str(error.strerror or error)
    if len(answer) == _FRAME_HEADER and answer[_TYPE] == _SETTINGS:
        return ""
    return "something else than Ray listens there"
