"""torchao's PT2E workflow, annotated for what the compiled model fuses.

from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

prepared = prepare_pt2e(torch.export.export(model, inputs).module(), x86quant.X86Quantizer())
calibrate(prepared)
fast = x86quant.compile(convert_pt2e(prepared), inputs)
"""

from x86quant.tested_versions import TORCHAO, check_tested

try:
    import torchao  # noqa: F401
except ImportError as error:
    raise ImportError(
        "x86quant.X86Quantizer needs the package torchao: pip install 'x86quant[pt2e]'"
    ) from error

check_tested("torchao", TORCHAO, "x86quant.X86Quantizer")

from x86quant.pt2e.x86_quantizer import X86Quantizer  # noqa: E402

__all__ = ["X86Quantizer"]
