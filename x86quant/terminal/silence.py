"""A block in which torch neither warns, logs nor prints: errors are raised instead."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def silent(*others: str) -> Iterator[None]:
    """No warnings, and nothing on stderr from the loggers of torch and of ``others``."""
    loggers = [logging.getLogger(name) for name in ("torch", *others)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
