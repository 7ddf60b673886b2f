"""Builds the extensions; everything else is declared in pyproject.toml."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path
from types import ModuleType

import setuptools

#: The versions of torch that the compiled part is tested with (``TESTED`` in x86quant/extension.py
#: says the same), and the fbgemm-gpu-cpu that belongs to each: its C++ loads beside no other.
FBGEMM_OF_TORCH = {"2.13": "1.8", "2.14": "1.9"}
#: Whether it is built to be installed elsewhere, beside other versions of torch and Python
#: (`python -m tools.wheel`).
FOR_OTHERS = "X86QUANT_FOR_OTHERS" in os.environ
#: The oldest Python, whose limited API the main extension is written in: one build serves all. A
#: free-threaded one has no such API.
OLDEST_PYTHON = "cp310"
OF_ONE_PYTHON = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
#: The first version that reads pyproject.toml as it is.
SETUPTOOLS = 77


def need_tools() -> None:
    """End with what to do where setuptools or pip are too old to install this."""
    if int(setuptools.__version__.split(".")[0]) < SETUPTOOLS:
        raise SystemExit(
            f"x86quant: this build needs setuptools {SETUPTOOLS} or later, and finds "
            f'{setuptools.__version__}: pip install "setuptools>={SETUPTOOLS}"'
        )
    if "develop" in sys.argv:
        raise SystemExit(
            "x86quant: this pip installs editable packages in a way that is gone: "
            "pip install --upgrade pip (21.3 or later)"
        )


def need_torch() -> str:
    """The version of torch; an end, with what to do, where it is not what the build needs."""
    tested = " or ".join(FBGEMM_OF_TORCH)
    wanted = f'pip install torch=={next(iter(FBGEMM_OF_TORCH))}.0 "setuptools>=77" ninja'
    then = "then install x86quant with --no-build-isolation"
    try:
        from torch import __version__ as version
    except ImportError:
        raise SystemExit(f"x86quant: this build needs torch {tested}: {wanted}; {then}") from None
    if minor(version) not in FBGEMM_OF_TORCH:
        raise SystemExit(
            f"x86quant: this build needs torch {tested}, and finds {version}: {wanted}; {then}"
        )
    return str(version)


def minor(version: str) -> str:
    """``2.13.0+cpu`` as ``2.13``."""
    return ".".join(version.split(".")[:2])


need_tools()
torch_version = need_torch()

from torch.utils.cpp_extension import (  # noqa: E402  once it is known to be there
    BuildExtension,
    CppExtension,
    include_paths,
)

#: Where compiled files stay: a wheel does not compile again what `pip install -e` has. They depend
#: on torch's headers, which no build looks at again.
PYTHON_TAG = f"{sys.implementation.cache_tag}{'t' if OF_ONE_PYTHON else ''}"
OBJECTS = Path("build", f"objects-{PYTHON_TAG}-torch-{torch_version}")
if given := os.environ.get("CFLAGS", ""):  # the others stay as they are
    OBJECTS = OBJECTS / f"flags-{zlib.crc32(given.encode()):08x}"

SERVING = Path("kernels", "serving")
SOURCES = sorted(str(path) for path in Path("kernels").glob("*/*.cpp") if path.parent != SERVING)
#: Those that read the objects of one torch and one Python: an extension of their own, which makes
#: some calls faster.
FAST = [source for source in SOURCES if Path(source).parent.name == "fast"]
#: Those that need torch's quantized tensors, packed parameters or FBGEMM: an extension of their
#: own, for the stock engine, without which all else works.
STOCK = [
    source
    for source in SOURCES
    if Path(source).parent.name in ("fbgemm", "onednn", "qnnpack", "routed")
    or source == "kernels/dynamic/stock.cpp"
]
#: What all extensions hold, hidden.
FOR_OLD_GLIBC = ["kernels/runtime/glibc_floor.cpp"]
#: What the stock extension finds the main one by, among what is loaded: no other has this name.
MAIN, SONAME = "x86quant._C", "x86quant_C.so"
#: The library that serves program files without torch.
RUNTIME = "libx86quant_runtime.so"
TOOLCHAIN = Path("kernels", "native", "toolchain.py")
#: Errors name files of ours and of torch's headers, without the folders that those lie in: the same
#: sources give the same bytes wherever they are built. (The last one that fits counts.)
PLACELESS = [
    f"-ffile-prefix-map={folder}={name}"
    for folder, name in ((Path.cwd(), "."), (Path(include_paths()[0]).parents[1], "."))
]


def toolchain() -> ModuleType:
    """What the C++ is compiled with."""
    spec = importlib.util.spec_from_file_location("toolchain", TOOLCHAIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def extension() -> list[CppExtension]:
    """The compiled parts; nothing where there is no compiler that can make them."""
    reason = toolchain().why_not()
    if reason is not None:
        print(
            f"x86quant: {reason}. Installing without the compiled part: compiled models will run "
            "in plain torch, slowly. To change that on x86 and Linux, install a compiler (Debian, "
            "Ubuntu: apt-get install g++), name another by CXX, or install a wheel that was built "
            "elsewhere (python -m tools.wheel).",
            file=sys.stderr,
        )
        return []
    # The headers of torch are not ours to be warned of.
    system = [flag for path in include_paths() for flag in ("-isystem", path)]
    flags = [*toolchain().flags(), *PLACELESS, "-g0", *system]
    # By which it knows packed weights of its own again.
    link = ["-Wl,--build-id=sha1"]
    # The names say the torch, so that one installation may hold one for each of several.
    of_torch = f"torch_{minor(torch_version).replace('.', '_')}"
    of_python = sys.implementation.cache_tag.replace("-", "_")
    main = CppExtension(
        MAIN,
        [source for source in SOURCES if source not in (*STOCK, *FAST)],
        extra_compile_args=[*flags, *(["-DX86QUANT_OF_ONE_PYTHON"] if OF_ONE_PYTHON else [])],
        extra_link_args=[*link, f"-Wl,-soname,{SONAME}"],
    )
    # It needs no more of torch than two functions of its C interface: it loads beside any.
    main.libraries = ["torch_cpu"]
    fast = CppExtension(
        f"x86quant._fast_{of_torch}_{of_python}",
        [together(FAST), *FOR_OLD_GLIBC],
        extra_compile_args=flags,
        extra_link_args=link,
    )
    return [
        main,
        CppExtension(
            f"x86quant._stock_{of_torch}",
            [together(STOCK), *FOR_OLD_GLIBC],
            extra_compile_args=flags,
            # What the main extension does not export is an error now, not when it loads.
            extra_link_args=[*link, "-Wl,--no-undefined"],
        ),
        # It reads what other threads may write where no GIL keeps them from it.
        *([] if OF_ONE_PYTHON else [fast]),
    ]


def together(sources: list[str]) -> str:
    """A file that includes ``sources``: torch's headers take longer than the rest of each."""
    made = OBJECTS / "together"
    made.mkdir(parents=True, exist_ok=True)
    path = made / ("stock.cpp" if sources is STOCK else "fast.cpp")
    up = Path(os.path.relpath(".", made))
    text = "".join(f'#include "{(up / file).as_posix()}"\n' for file in sources)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return str(path)


class Build(BuildExtension.with_options(no_python_abi_suffix=True)):
    """Builds the extensions, and of the main one's objects the library that needs no torch.

    The objects stay in ``OBJECTS``; an editable install would throw them away.
    """

    def build_extensions(self) -> None:
        """Compile what has changed, and link."""
        self.build_temp = str(OBJECTS)
        super().build_extensions()

    def build_extension(self, ext: CppExtension) -> None:
        """The main extension and the library; the others, the stock one linked to the main one."""
        main = self.get_ext_fullpath(MAIN)
        if "_stock_" in ext.name:
            ext.extra_link_args.append(main)
        super().build_extension(ext)
        if ext.name == MAIN:
            self.link_runtime(Path(main).with_name(RUNTIME))

    def link_runtime(self, library: Path) -> None:
        """Compile what only the library has, and link it."""
        compiler = shlex.split(toolchain().compiler())
        folder = Path(self.build_temp, SERVING)
        folder.mkdir(parents=True, exist_ok=True)
        flags = [*toolchain().flags(), *PLACELESS]
        flags += [*shlex.split(os.environ.get("CFLAGS", "")), "-g0"]
        objects = [
            str(Path(self.build_temp, source).with_suffix(".o")) for source in without_torch()
        ]
        for source in sorted(SERVING.glob("*.cpp")):
            objects.append(str(folder / f"{source.stem}.o"))
            headers = ["-I", str(SERVING / "include")]
            command = [*compiler, *flags, *headers, "-c", str(source), "-o", objects[-1]]
            subprocess.run(command, check=True)
        exported = SERVING / "exported.map"
        named = f"-Wl,--build-id=sha1,-soname,{RUNTIME},--version-script={exported}"
        link = ["-shared", "-pthread", named]
        link += shlex.split(os.environ.get("LDFLAGS", ""))
        aside = library.with_suffix(".new")  # a process may have the old one mapped
        subprocess.run([*compiler, *flags, *link, *objects, "-o", str(aside)], check=True)
        aside.replace(library)

    def copy_extensions_to_source(self) -> None:
        """Copy the library too."""
        super().copy_extensions_to_source()
        library = Path(self.build_lib, "x86quant", RUNTIME)
        if library.exists():
            shutil.copy(library, Path("x86quant", f"{RUNTIME}.new"))
            Path("x86quant", f"{RUNTIME}.new").replace(Path("x86quant", RUNTIME))

    def get_outputs(self) -> list[str]:
        """What an installation holds."""
        library = [str(Path(self.build_lib, "x86quant", RUNTIME))] if self.extensions else []
        return [*super().get_outputs(), *library]


def without_torch() -> list[str]:
    """The sources of the extension that the library shares with it."""
    names = [*Path("kernels", "native").glob("*.cpp"), *Path("kernels", "steps").glob("*.cpp")]
    names += [Path("kernels", "runtime", f"{name}.cpp") for name in toolchain().WITHOUT_TORCH]
    return sorted(map(str, names))


def dependencies() -> list[str]:
    """What is installed beside: torch, and what goes with it.

    The stock engine's part, and the C++ of fbgemm-gpu-cpu, load beside one torch alone: a build
    takes the torch that is there, which nothing else that is installed then replaces, and what
    belongs to it. A wheel for others cannot say that: where the two do not fit, our lookups in
    FBGEMM's own tables say so, and all else runs.
    """
    here = minor(torch_version)
    torch, fbgemm = (
        next(iter(FBGEMM_OF_TORCH.items())) if FOR_OTHERS else (here, FBGEMM_OF_TORCH[here])
    )
    least, end = (">=", "") if FOR_OTHERS else ("==", ".*")
    return [
        f"torch{least}{torch}{end}",
        "numpy>=1.26",
        "py-cpuinfo>=9.0",
        # There are files of it for Linux alone, and only lookups of its own tables need it.
        f"fbgemm-gpu-cpu{least}{fbgemm}{end}; sys_platform == 'linux'",
        "safetensors>=0.5",
        "tomli>=2.0; python_version < '3.11'",
    ]


setuptools.setup(
    install_requires=dependencies(),
    ext_modules=extension(),
    # No ISA flags: kernels choose their instructions at run time. No OpenMP either: see
    # kernels/runtime/torch_threads.cpp.
    cmdclass={"build_ext": Build},
    options={} if OF_ONE_PYTHON else {"bdist_wheel": {"py_limited_api": OLDEST_PYTHON}},
)
