"""What a service counts, as the text that Prometheus reads."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Sequence

#: Upper bounds of the buckets.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Histogram:
    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> list[str]:
        found = _head(self._name, self._text, "histogram")
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            found.append(f'{self._name}_bucket{{le="{bound}"}} {total}')
        return [*found, f"{self._name}_sum {self._sum:.6f}", f"{self._name}_count {total}"]


def _head(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


class Metrics:
    """Counters and histograms of one service; used from its event loop alone."""

    def __init__(self) -> None:
        self._requests: collections.Counter[tuple[str, int]] = collections.Counter()
        self._tokens = 0
        self._latency = _Histogram(
            "x86quant_request_seconds", "From the whole request to the answer.", _SECONDS
        )
        self._wait = _Histogram("x86quant_queue_seconds", "Until a text's turn came.", _SECONDS)
        self._inference = _Histogram("x86quant_batch_seconds", "Calls of the model.", _SECONDS)
        self._rows = _Histogram("x86quant_batch_texts", "Texts in a call of the model.", _ROWS)
        self._sizes = _Histogram("x86quant_batch_tokens", "Tokens in a call of the model.", _TOKENS)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self._requests[route, status] += 1
        self._latency.add(seconds)

    def waited(self, seconds: float) -> None:
        """A text's turn came."""
        self._wait.add(seconds)

    def ran(self, texts: int, tokens: int, seconds: float) -> None:
        """The model was called."""
        self._tokens += tokens
        self._rows.add(texts)
        self._sizes.add(tokens)
        self._inference.add(seconds)

    def text(self, waiting: int) -> str:
        """All of it; ``waiting`` is how many texts wait now."""
        lines = _head("x86quant_requests_total", "Requests answered.", "counter")
        for (route, status), count in sorted(self._requests.items()):
            lines.append(f'x86quant_requests_total{{route="{route}",status="{status}"}} {count}')
        lines += _head("x86quant_tokens_total", "Tokens computed.", "counter")
        lines.append(f"x86quant_tokens_total {self._tokens}")
        lines += _head("x86quant_queue_texts", "Texts that wait for their turn.", "gauge")
        lines.append(f"x86quant_queue_texts {waiting}")
        for one in (self._latency, self._wait, self._inference, self._rows, self._sizes):
            lines += one.lines()
        return "\n".join(lines) + "\n"
