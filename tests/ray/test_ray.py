"""Ray: tables in and out, serving, tuning a cluster; on one of several processes, some killed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import runpy
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import pyarrow as pa
import pytest
import ray
import ray.data
import ray.serve
import torch
from ray.cluster_utils import Cluster
from ray.data.extensions import ArrowTensorArray
from starlette.requests import Request
from torch import nn

import x86quant
from tests.project.test_docs import ROOT, blocks, given
from x86quant.artifacts.reader import Input
from x86quant.cli import main as x86quant_command
from x86quant.errors import InvalidInputError, TuningError, UnsupportedError, X86QuantError
from x86quant.ray import fleet, nodes, predict, serve_artifact
from x86quant.ray.batch_inference import BatchPredictor
from x86quant.ray.columns import arguments, results, to_tensor
from x86quant.ray.cores import lease
from x86quant.ray.requests import answer_all, read_body, read_sample, to_json
from x86quant.ray.serving import ArtifactServer, deployment
from x86quant.tables.table import Rule
from x86quant.tables.table_reader import read_table
from x86quant.tuning import user_table
from x86quant.tuning.measurement_files import read

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

SMALL = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4))
    batches = [torch.randn(4, 3, 6, 6) for _ in range(2)]
    int8 = x86quant.quantize(
        nn.Sequential(*layers).eval(), batches, speed_check=False, progress=False
    )
    path = tmp_path_factory.mktemp("ray") / "net.x86q"
    x86quant.save(int8, path)
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **SMALL})
    ray.init(address=made.address, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield made
    ray.shutdown()
    made.shutdown()


# ---------------------------------------------------------------------------- tables


def test_columns_are_read_in_place() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    for column in (
        ArrowTensorArray.from_numpy(values),
        pa.FixedShapeTensorArray.from_numpy_ndarray(values),
        pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(values.ravel(), 3), 2),
    ):
        found = to_tensor(pa.table({"x": column}).slice(1, 2), "x")
        assert torch.equal(found, torch.from_numpy(values[1:3]))
        addresses = [b.address for b in column.buffers() if b is not None]
        assert found.data_ptr() - values[0].nbytes in addresses
    lists = pa.table({"x": pa.array(values.reshape(4, 6).tolist())})
    assert to_tensor(lists, "x").shape == (4, 6)
    flags = pa.table({"x": pa.chunked_array([[True], [False, True]])})
    assert to_tensor(flags, "x").tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ([1.0, None], "1 missing values"),
        ([[1, None], [2, 3]], "1 missing values"),
        ([[1], [2, 3]], "different sizes"),
        (ArrowTensorArray.from_numpy([np.zeros(2), np.zeros(3)]), "different sizes"),
        (["a", "b"], "holds string"),
    ],
)
def test_columns_that_no_model_takes(column: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        to_tensor(pa.table({"x": column}), "x")


def test_arguments_and_results_by_order_and_by_name() -> None:
    table = pa.table({"a": [1, 2], "b": [3, 4]})
    (args, kwargs) = arguments(table, ("b", "a"))
    assert [x.tolist() for x in args] == [[3, 4], [1, 2]]
    assert not kwargs
    assert arguments(table, {"x": "b"})[1]["x"].tolist() == [3, 4]
    with pytest.raises(InvalidInputError, match="no column 'c'; the columns are a, b"):
        arguments(table, "c")

    one, two = torch.zeros(2), torch.ones(2, 3)
    assert [name for name, _ in results((one, two), ("p", "q"), 2)] == ["p", "q"]
    assert [name for name, _ in results({"k": one, "l": two}, {"l": "q"}, 2)] == ["q"]
    for found, outputs, words in (
        ((one, two), "p", "is a tuple, no tensor"),
        ((one, two), ("p",), "2 results, and outputs names 1"),
        ({"k": one}, ("p",), "by its name"),
        ({"k": one}, {"z": "p"}, "'k' by name, and no 'z'"),
        (torch.zeros(3), "p", "not one for each of the 2 rows"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            list(results(found, outputs, 2))


def test_a_predictor_gives_a_table_for_a_table(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "get", lambda reference: reference)
    x = torch.randn(5, 3, 6, 6)
    table = pa.table({"id": range(5), "x": ArrowTensorArray.from_numpy(x.numpy())})

    def predictor(**changes: Any) -> BatchPredictor:
        usual = {"inputs": "x", "outputs": "y", "keep": ["id"], "warm_for": 4, "threads": 1}
        return BatchPredictor(
            **{"artifact": [artifact.read_bytes()], "pin": False, "model": None, **usual, **changes}
        )

    found = predictor()(table)
    assert found.column_names == ["id", "y"]
    assert torch.equal(to_tensor(found, "y"), x86quant.load(artifact)(x))
    with pytest.raises(InvalidInputError, match="there already"):
        predictor(outputs="id")(table)
    with pytest.raises(InvalidInputError, match="keep names z"):
        predictor(keep=["z"])(table)


def test_no_two_workers_have_a_core_in_common(tmp_path: Path) -> None:
    all_cores = os.sched_getaffinity(0)
    first = lease(1, tmp_path)
    assert first is not None
    rest = lease(len(all_cores) - 1, tmp_path) if len(all_cores) > 1 else None
    assert rest is None or rest.cores == all_cores - first.cores
    assert lease(1, tmp_path) is None
    del first
    assert lease(1, tmp_path) is not None


def killer_of(name: str, flag: Path, row: int) -> Any:
    """For a dataset: passes rows on, but before ``row`` kills a process here called ``name``.

    So what comes behind cannot have ended by then.
    """

    def kill(folder: Path) -> bool:
        import os
        import signal

        try:
            title = (folder / "cmdline").read_bytes().decode()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
        if name not in title or parent != os.getppid():
            return False
        os.kill(int(folder.name), signal.SIGKILL)
        flag.write_text(title)
        return True

    def kill_once(batch: pa.Table) -> pa.Table:
        import time
        from pathlib import Path

        if row in batch["id"].to_pylist() and not flag.exists():
            while not any(kill(folder) for folder in Path("/proc").glob("[0-9]*")):
                time.sleep(0.1)
        return batch

    return kill_once


def test_all_rows_come_once_and_in_order_though_a_worker_is_killed(
    cluster: Cluster, artifact: Path, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).standard_normal((128, 3, 6, 6), dtype=np.float32)
    dataset = ray.data.from_items(
        [{"id": i, "x": x[i]} for i in range(len(x))], override_num_blocks=16
    )
    flag = tmp_path / "killed"
    kill = killer_of("BatchPredictor", flag, row=64)
    watched = dataset.map_batches(kill, num_cpus=0, batch_format="pyarrow")
    found = predict(
        watched, artifact, inputs="x", outputs="y", keep=["id"], batch_size=4, workers=2,
        in_order=True,
    )  # fmt: skip
    assert dataset.context.execution_options.preserve_order
    rows = found.take_all()
    assert "BatchPredictor" in flag.read_text()
    assert [row["id"] for row in rows] == list(range(len(x)))
    expected = x86quant.load(artifact)(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(np.stack([row["y"] for row in rows]), expected, rtol=1e-6)


def test_what_is_wrong_is_said_before_anything_runs(
    cluster: Cluster, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = ray.data.range(4)
    damaged = tmp_path / "damaged.x86q"
    damaged.write_bytes(artifact.read_bytes()[:-5])
    for path, options, error, words in (
        (damaged, {}, X86QuantError, "damaged.x86q cannot be loaded"),
        (artifact, {"threads": 0}, InvalidInputError, "threads is 0"),
        (artifact, {"workers": (2, 1)}, InvalidInputError, "the least comes first"),
    ):
        with pytest.raises(error, match=words):
            predict(dataset, path, inputs="id", outputs="y", **options)
    monkeypatch.setattr(nodes, "__version__", "9.9")
    with pytest.raises(UnsupportedError, match=r"needs x86quant 9\.9 .* has x86quant 0\."):
        predict(dataset, artifact, inputs="id", outputs="y")


# ---------------------------------------------------------------------------- serving

PICTURE = Input("x", "torch.float32", (4, 2, 2))
TOKENS = Input("ids", "torch.int64", (4, 3))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"[1]", "no JSON object"),
        (b"{}", "missing or unknown: 'ids', 'x'"),
        (b'{"x": [[1, 2], [3]], "ids": [1, 2, 3]}', "'x' is no number, nor lists"),
        (b'{"x": "a", "ids": [1, 2, 3]}', "'x' is no number"),
        (b'{"x": [1, 2], "ids": [1, 2, 3]}', "a sample has 2 dimensions"),
        (b'{"x": [[1, 2], [3, NaN]], "ids": [1, 2, 3]}', "'x' holds values that float32"),
        (b'{"x": [[1, 2], [3, 1e39]], "ids": [1, 2, 3]}', "'x' holds values that float32"),
        (b'{"x": [[1, 2], [3, 4]], "ids": [1.5, 2, 3]}', "'ids' holds values that int64"),
        (b'{"x": ' + b"[" * 100_000, "JSON"),
    ],
)
def test_requests_that_are_none(body: bytes, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        read_body(body, (PICTURE, TOKENS))


def test_a_request_is_read_as_what_the_model_takes() -> None:
    found = read_body(b'{"x": [[1, 2], [3, 4.5]], "ids": [1, 2.0, 3]}', (PICTURE, TOKENS))
    assert found["x"].dtype is torch.float32
    assert found["ids"].tolist() == [1, 2, 3]
    assert found["ids"].dtype is torch.int64
    small = Input("x", "torch.uint8", (4, 1))
    with pytest.raises(InvalidInputError, match="uint8"):
        read_sample({"x": [256]}, (small,))


def test_one_bad_request_spoils_no_other() -> None:
    calls = []

    def run(args: Any, kwargs: Any) -> torch.Tensor:
        calls.append(tuple(args[0].shape))
        if (args[0] < 0).any():
            raise InvalidInputError("below zero")
        return args[0] * 2

    samples = [{"x": torch.tensor(values)} for values in ([1.0], [-1.0], [3.0], [1.0, 2.0])]
    one, bad, three, longer = answer_all(run, ["x"], samples)
    assert (one.tolist(), three.tolist(), longer.tolist()) == ([2.0], [6.0], [2.0, 4.0])
    assert isinstance(bad, InvalidInputError)
    assert calls == [(3, 1), (1, 1), (1, 1), (1, 1), (1, 2)]
    (error,) = answer_all(lambda args, kwargs: torch.zeros(7), ["x"], samples[:1])
    assert "no part for each sample" in str(error)
    with pytest.raises(UnsupportedError, match="NaN"):
        to_json({"y": np.array([np.nan])})


def posted(body: bytes, method: str = "POST") -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "method": method, "headers": []}, receive)


def test_a_server_makes_batches_and_answers_each(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which looks at the replica that this is not.
    warn = "ray.serve.batching._BatchQueue._warn_if_max_batch_size_exceeds_max_ongoing_requests"
    monkeypatch.setattr(warn, lambda queue: None)
    server = ArtifactServer(str(artifact), 4, 5.0, 1, False)
    sizes: list[int] = []
    model = server._model

    def spied(args: Any, kwargs: Any) -> Any:
        sizes.append(len(args[0]))
        return model(args, kwargs)

    server._model = spied  # type: ignore[assignment]
    x = torch.randn(4, 3, 6, 6)
    (name,) = server._names

    async def use() -> list[Any]:
        found = await asyncio.gather(*(server.predict(**{name: one}) for one in x))
        await server.check_health()
        good = json.dumps({name: x[0].tolist()}).encode()
        answers = [
            await server(posted(body, method))
            for body, method in ((good, "POST"), (b"{}", "POST"), (b"", "GET"))
        ]
        server._expected = b"another"
        with pytest.raises(X86QuantError, match="another result"):
            await server.check_health()
        return [*found, *answers]

    server._answer.set_batch_wait_timeout_s(0.2)
    *found, good, bad, read_only = asyncio.run(use())
    assert sizes[0] == 4
    expected = x86quant.load(artifact)(x).detach().numpy()
    np.testing.assert_array_equal(np.stack(found), expected)
    np.testing.assert_allclose(json.loads(good.body), expected[0], rtol=1e-6)
    assert (good.status_code, bad.status_code, read_only.status_code) == (200, 400, 405)
    assert "missing or unknown" in json.loads(bad.body)["error"]


def test_deployments_say_what_is_wrong(artifact: Path) -> None:
    with pytest.raises(InvalidInputError, match="at least 1"):
        deployment(artifact, max_batch_size=0)
    with pytest.raises(InvalidInputError, match="least of them comes first"):
        deployment(artifact, replicas=(3, 2))
    with pytest.raises(OSError, match="No such file"):
        deployment(artifact.with_name("nothing"))


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


def test_the_page_and_the_examples_run_and_bad_requests_are_answered(
    cluster: Cluster, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    names = given()
    for _, code in blocks(ROOT / "docs" / "ray.md"):
        exec(code.replace("port=8000", f"port={port}"), names)
    expected = names["int8"](names["x"][:1])[0].numpy()
    np.testing.assert_allclose(names["scores"], expected, rtol=1e-5)

    with pytest.raises(InvalidInputError, match=f"at port {port} already"):
        serve_artifact("net.x86q", port=port + 1)
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/", b'{"input": [1, 2]}', method="POST"
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == 400
    assert "a sample has 3 dimensions" in json.loads(refused.value.read())["error"]

    example = (ROOT / "examples" / "ray_serve.py").read_text()
    exec(example.replace("8000", str(port)), {"__name__": "__main__"})
    assert "8 answers; largest difference from a run here: 0" in capsys.readouterr().out
    ray.serve.shutdown()
    runpy.run_path(str(ROOT / "examples" / "ray_batch.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "256 rows, the last is image 255" in said
    assert "largest difference from a run in this process: 0" in said


# ---------------------------------------------------------------------------- tuning


def test_a_node_without_the_package_is_named(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['x86quant'] = None")
    node = cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(tmp_path)}, **SMALL)
    try:
        there = node.node_id[:8]
        with pytest.raises(UnsupportedError, match=rf", {there}\) has no x86quant"):
            fleet.kinds()
    finally:
        cluster.remove_node(node)


def test_each_kind_is_measured_once_and_has_its_own_table(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if x86quant.cpu().isa == "avx2":
        pytest.skip("this CPU has no lower level that another kind could be")
    shapes = tmp_path / "shapes.csv"
    head = "op,net,layer,groups,ic,oc,id,ih,iw,kd,kh,kw,sd,sh,sw,pd,ph,pw,dd,dh,dw"
    empty = "," * 15
    shapes.write_text(f"{head}\nlinear,n,a,1,16,8{empty}\n")
    node = cluster.add_node(num_cpus=1, env_vars={"X86QUANT_ISA": "avx2"}, **SMALL)
    lost: list[str] = []
    measure = fleet._Level.measure

    def measure_and_lose(level: Any, cases: Any, limit: float) -> Any:
        found = measure(level, cases, limit)
        if level._isa == "avx2" and not lost:  # killed between two ops
            lost.append(level._isa)
            ray.kill(level._node._actor)
        return found

    monkeypatch.setattr(fleet._Level, "measure", measure_and_lose)
    command = ["tune", "--ray", "--shapes", str(shapes), "--rows", "4", "--callers", "graph"]
    try:
        assert x86quant_command([*command, "--json"]) == 0
    finally:
        cluster.remove_node(node)
    done = {one["kind"]: one for one in json.loads(capsys.readouterr().out)}
    assert lost
    assert len(done) == 2
    machines = set()
    for name, one in done.items():
        isa = name.rpartition("-")[2]
        measured = read(one["measurements"])
        machines |= {m.case.machine for m in measured}
        # Static and dynamic, hot and rotated; every case once, of this kind alone.
        assert {m.case.isa for m in measured} == {isa}
        assert len(measured.cases()) == one["cases"] == 4
        (path,) = one["tables"]
        here = x86quant.cpu().capped(isa)
        assert read_table(path).fits(here)
        assert not read_table(path).fits(dataclasses.replace(here, model=here.model + 1))
        assert len(one["installed"]) == 1
    assert len(machines) == 1  # here; the name of a kind has the level, too


def test_another_kinds_table_is_not_replaced(tmp_path: Path) -> None:
    here = x86quant.cpu()
    other = dataclasses.replace(here, model=here.model + 1)
    installed = user_table.install(user_table.empty_table(other), other)
    try:
        mine = user_table.empty_table(here)
        with pytest.raises(TuningError, match="shares this folder"):
            fleet.install_here(mine, None, here.isa)
        with pytest.raises(TuningError, match="another kind of CPU"):
            fleet.install_here(user_table.empty_table(other), None, here.isa)
        assert user_table.users_table(here).entries == ()
    finally:
        installed.unlink()


def test_entries_leave_the_rules_of_a_node() -> None:
    here = x86quant.cpu()
    empty = user_table.empty_table(here)
    rule = Rule("linear", {}, ("onednn",), "measured before", "before#1")
    installed = user_table.install(dataclasses.replace(empty, rules=(rule,)), here)
    try:
        assert fleet.install_here(empty, [], here.isa) == installed
        assert [r.because for r in read_table(installed).rules] == ["measured before"]
        fleet.install_here(empty, None, here.isa)
        assert read_table(installed).rules == ()
    finally:
        installed.unlink()


def test_no_cluster_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def init(**options: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(TuningError, match="no Ray cluster at auto"):
        fleet.connect("auto")
