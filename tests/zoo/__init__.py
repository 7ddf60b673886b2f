"""Small architectures of every kind with random weights, on which ``quantize`` has to hold."""

from tests.zoo.cases import Animal, Inputs, call, floats, sqnr
from tests.zoo.hugging_face import HUGGING_FACE
from tests.zoo.patterns import PATTERNS
from tests.zoo.torchvision_networks import TORCHVISION
from tests.zoo.unusual_code import UNUSUAL_CODE

ZOO: tuple[Animal, ...] = (*PATTERNS, *UNUSUAL_CODE, *HUGGING_FACE, *TORCHVISION)

__all__ = ["ZOO", "Animal", "Inputs", "call", "floats", "sqnr"]
