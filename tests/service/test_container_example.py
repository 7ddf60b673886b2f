"""The files of examples/container agree with the package: versions, arguments, paths, the port."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.service.word_engine import WordEngine
from x86quant.cli import parser
from x86quant.extension import TESTED
from x86quant.service import EncoderService

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).parents[2] / "examples" / "container"
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")


def test_both_stages_have_one_torch_that_is_tested() -> None:
    versions = re.findall(r"torch==([\d.]+)\+cpu", DOCKERFILE)
    assert len(versions) == 2
    assert len({*versions}) == 1
    assert ".".join(versions[0].split(".")[:2]) in TESTED


def test_the_deployment_asks_for_what_there_is() -> None:
    deployment, service = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = parser().parse_args(["serve", *container["args"]])
    (port,) = container["ports"]
    assert options.port == port["containerPort"]
    assert f"EXPOSE {options.port}" in DOCKERFILE
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in EncoderService(WordEngine())._routes
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > options.grace + pause
    assert str(options.folder) in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    resources = container["resources"]
    assert resources["requests"] == resources["limits"]
