"""Versions of other packages that a front end was tested with; others may mean other things."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from x86quant.errors import UnsupportedError

#: Releases of torchao that the tests ran with.
TORCHAO = ("0.18",)


def check_tested(package: str, tested: Sequence[str], user: str) -> None:
    """Raise UnsupportedError unless the installed ``package`` is of one of the ``tested`` releases.

    Args:
        package: as pip calls it; it is installed.
        tested: what versions start with, such as "0.18".
        user: what of ours needs it.
    """
    installed = version(package)
    if not any(f"{installed}.".startswith(f"{release}.") for release in tested):
        raise UnsupportedError(
            f"{user} was tested with {package} {' and '.join(tested)}, and {installed} is "
            f"installed: pip install '{package}=={tested[-1]}.*'"
        )
