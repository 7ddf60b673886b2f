"""Int8 models from ``transformers``: made while loading, saved, and read from others' files.

    import x86quant
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, quantization_config=x86quant.X86QuantConfig())
    model.save_pretrained(other)

Importing this package imports transformers and registers the quantization method "x86quant" there,
so that ``AutoModel.from_pretrained(other)`` knows it.
"""

from x86quant.errors import UnsupportedError

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "x86quant.huggingface needs the package transformers: pip install 'x86quant[huggingface]'"
    ) from error

if int(transformers.__version__.split(".")[0]) < 5:
    raise UnsupportedError(
        f"x86quant.huggingface needs transformers 5 or later, and {transformers.__version__} is "
        "installed: pip install --upgrade 'x86quant[huggingface]'"
    )

from x86quant.huggingface.int8_cache import Int8Cache
from x86quant.huggingface.load_model import load
from x86quant.huggingface.load_quantizer import X86HfQuantizer
from x86quant.huggingface.load_settings import X86QuantConfig

__all__ = ["Int8Cache", "X86HfQuantizer", "X86QuantConfig", "load"]
