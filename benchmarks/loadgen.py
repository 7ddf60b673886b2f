"""MLPerf's load generator before the encoder service: SingleStream, Offline and Server.

    pip install mlcommons-loadgen
    python -m benchmarks.loadgen                                 # ours, MiniLM
    python -m benchmarks.loadgen --engines x86quant openvino-qint8 --seconds 30

Each engine is a process of its own behind the same application and server, on one core, as in
benchmarks.service_load, whose texts these are; LoadGen and the requests are on another. A sample
is a text, a request of SingleStream and Server holds one, one of Offline 32. Server's rate is
``--share`` of what Offline gave. Percentiles are LoadGen's own, read from its log. It ends with an
error where an answer is missing.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import queue
import re
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import print_environment
from benchmarks.sentence_efficiency import BEHIND, OURS
from benchmarks.service_load import SHARES, kinds_of_texts, servers

_TEXTS = 512
_CONNECTIONS = 32
_OFFLINE_TEXTS = 32
_PERCENTILES = ("50.00", "99.00", "99.90")


class Requests:
    """Asks a server over a few connections, and tells LoadGen what was answered."""

    def __init__(self, port: int, texts: Sequence[str], together: int) -> None:
        self._port, self._texts, self._together = port, texts, together
        self._waiting: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self.refused = 0
        self._threads = [threading.Thread(target=self._work) for _ in range(_CONNECTIONS)]
        for thread in self._threads:
            thread.start()

    def issue(self, samples: Sequence[Any]) -> None:
        """What LoadGen calls with queries."""
        for at in range(0, len(samples), self._together):
            self._waiting.put([(one.id, one.index) for one in samples[at : at + self._together]])

    def close(self) -> None:
        """End the threads."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        import mlperf_loadgen as lg

        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        while (samples := self._waiting.get()) is not None:
            body = {"inputs": [self._texts[index] for _, index in samples], "truncate": True}
            connection.request("POST", "/embed", json.dumps(body))
            answer = connection.getresponse()
            found = answer.read()
            self.refused += answer.status != 200 or len(found) < len(samples)
            lg.QuerySamplesComplete([lg.QuerySampleResponse(sample, 0, 0) for sample, _ in samples])
        connection.close()


def measured(
    port: int, scenario: str, seconds: float, rate: float, texts: Sequence[str]
) -> dict[str, float]:
    """What LoadGen found: by the names in its summary, latencies in milliseconds."""
    import mlperf_loadgen as lg

    settings = lg.TestSettings()
    settings.scenario = getattr(lg.TestScenario, scenario)
    settings.mode = lg.TestMode.PerformanceOnly
    settings.min_duration_ms = int(seconds * 1000)
    settings.min_query_count = 1
    settings.single_stream_expected_latency_ns = 2_000_000
    settings.offline_expected_qps = settings.server_target_qps = max(rate, 1.0)
    settings.server_target_latency_ns = 100_000_000
    requests = Requests(port, texts, _OFFLINE_TEXTS if scenario == "Offline" else 1)
    system = lg.ConstructSUT(requests.issue, lambda: None)
    samples = lg.ConstructQSL(len(texts), len(texts), lambda _: None, lambda _: None)
    with tempfile.TemporaryDirectory() as folder:
        log = lg.LogSettings()
        log.log_output = lg.LogOutputSettings()
        log.log_output.outdir = folder
        lg.StartTestWithLogSettings(system, samples, settings, log)
        summary = Path(folder, "mlperf_log_summary.txt").read_text()
    lg.DestroyQSL(samples)
    lg.DestroySUT(system)
    requests.close()
    if requests.refused:
        raise SystemExit(f"{scenario}: {requests.refused} requests were not answered")
    return _read(summary)


def _read(summary: str) -> dict[str, float]:
    """The numbers in LoadGen's summary."""
    found = {}
    for name in _PERCENTILES:
        if line := re.search(rf"{name} percentile latency \(ns\)\s*: (\d+)", summary):
            found[name] = int(line[1]) / 1e6
    if line := re.search(r"^Mean latency \(ns\)\s*: (\d+)", summary, re.MULTILINE):
        found["rate"] = 1e9 / int(line[1])  # of one after another
    for name in ("Samples per second", "Completed samples per second"):
        if line := re.search(rf"^{name}\s*: ([\d.]+)", summary, re.MULTILINE):
            found["rate"] = float(line[1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="*", choices=(OURS, *BEHIND), default=(OURS,))
    parser.add_argument("--model", choices=("minilm", "bert-base"), default="minilm")
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=60, help="of each scenario")
    parser.add_argument("--share", type=float, default=0.6, help="of Offline's rate, for Server")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this needs two cores: one serves, the other makes the load")
    texts = [
        text
        for kind, share in zip(kinds_of_texts(), SHARES, strict=True)
        for text in (kind * _TEXTS)[: round(share * _TEXTS)]
    ]
    print_environment()
    os.sched_setaffinity(0, {cores[1]})
    print(f"{'':<18}{'scenario':<14}{'texts/s':>9}" + "".join(f"  p{p}, ms" for p in _PERCENTILES))
    with servers(options, cores[0]) as ports:
        for name, port in ports.items():
            measured(port, "Offline", 5, 200, texts)  # shapes are planned
            rate = 0.0
            # LoadGen sends Offline what it expects to be answered in time: more texts at once take
            # less than one by one, but not by much.
            for scenario, factor in (
                ("SingleStream", 0.0), ("Offline", 1.3), ("Server", options.share)
            ):  # fmt: skip
                found = measured(port, scenario, options.seconds, factor * rate, texts)
                rate = found["rate"]
                times = "".join(f"{found.get(p, float('nan')):>11.1f}" for p in _PERCENTILES)
                print(f"{name:<18}{scenario:<14}{rate:>9.0f}{times}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
