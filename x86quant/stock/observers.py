"""Our observers as stock PyTorch's, so that they work in any ``QConfig``::

QConfig(activation=MSEObserver.with_args(dtype=torch.quint8), weight=PerChannelMSEObserver...)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.ao.quantization import (
    FixedQParamsObserver,
    HistogramObserver,
    MinMaxObserver,
    ObserverBase,
    PerChannelMinMaxObserver,
)

from x86quant.observing.activations import (
    KLObserver,
    MSEObserver,
    ObserverName,
    PercentileObserver,
    StreamingHistogramObserver,
)
from x86quant.observing.fixed import FixedRangeObserver
from x86quant.observing.observer import RangeObserver
from x86quant.observing.weights import PerChannelMSEObserver, WeightObserverName

# Stock code asks ``isinstance(module, ObserverBase)``, and reads attributes that ours have too.
ObserverBase.register(RangeObserver)
FixedQParamsObserver.register(FixedRangeObserver)

#: Activation observers by the name users give them.
OBSERVERS: Mapping[str, Any] = {
    "minmax": MinMaxObserver,
    "histogram": HistogramObserver,
    "percentile": PercentileObserver,
    "mse": MSEObserver,
    "kl": KLObserver,
}

#: Per-channel weight observers by name.
WEIGHT_OBSERVERS: Mapping[str, Any] = {
    "minmax": PerChannelMinMaxObserver,
    "mse": PerChannelMSEObserver,
}

__all__ = [
    "OBSERVERS",
    "WEIGHT_OBSERVERS",
    "FixedRangeObserver",
    "KLObserver",
    "MSEObserver",
    "ObserverName",
    "PerChannelMSEObserver",
    "PercentileObserver",
    "StreamingHistogramObserver",
    "WeightObserverName",
]
