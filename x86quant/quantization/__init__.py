"""Post-training quantization, quantization-aware training, and the accuracy kit.

``entry`` is the one call; ``plan`` decides, ``batches`` reads data, ``tracing`` and ``exported``
make graphs, ``static_part`` observes and converts them. ``equalization``, ``smoothing`` and
``bias_correction`` are the accuracy kit; ``harm``, ``ranking`` and ``search`` find the layers that
should stay in float.
"""

from x86quant.quantization.entry import quantize
from x86quant.quantization.layer_statistics import LayerStatistics, statistics
from x86quant.quantization.search import SearchResult, Trial
from x86quant.quantization.sensitivity_ranking import LayerSensitivity, Sensitivity, sensitivity
from x86quant.quantization.summary import Summary
from x86quant.quantization.training.qat import convert_qat, prepare_qat

__all__ = [
    "LayerSensitivity",
    "LayerStatistics",
    "SearchResult",
    "Sensitivity",
    "Summary",
    "Trial",
    "convert_qat",
    "prepare_qat",
    "quantize",
    "sensitivity",
    "statistics",
]
