"""An ``EncoderService`` behind uvicorn, until it is told to end."""

from __future__ import annotations

import contextlib
import errno
import gc
import math
import signal
import socket
from types import FrameType

from x86quant.errors import InvalidInputError
from x86quant.service.asgi import application
from x86quant.service.encoder_service import EncoderService


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at ``host`` and ``port``; 0 is any port.

    Raises:
        InvalidInputError: nobody can.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        why = getattr(error, "strerror", None) or str(error)
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            why = "another program is listening there"
        raise InvalidInputError(
            f"cannot serve at {host}:{port}: {why}; give another port"
        ) from None
    return found


def settle() -> None:
    """Leave all objects that there are out of garbage collection, from now on.

    A process that has loaded torch and transformers has so many that a full collection takes
    longer than most requests, and finds nothing.
    """
    gc.collect()
    gc.freeze()


def serve(service: EncoderService, at: socket.socket, grace_s: float) -> None:
    """Answer at the socket ``at`` until SIGTERM or SIGINT.

    Then whatever was asked is still answered, for ``grace_s`` at most, and nothing new is taken.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise ImportError("to serve needs uvicorn: pip install 'x86quant[serve]'") from error

    class Server(uvicorn.Server):
        # Not uvicorn's own, which sends the signal once more at the end, when all is well.
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.force_exit = service.draining and sig == signal.SIGINT
            service.draining = self.should_exit = True

    config = uvicorn.Config(
        application(service),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(grace_s),
        timeout_keep_alive=75,  # longer than what balancers keep, who would else ask too late
    )
    settle()
    with contextlib.closing(at):
        Server(config).run(sockets=[at])
