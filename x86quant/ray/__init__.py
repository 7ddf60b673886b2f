"""int8 models on many machines, by Ray: batches, serving, and tuning a whole cluster.

    from x86quant.ray import predict

    predicted = predict(dataset, "net.x86q", inputs="image", outputs="scores", workers=4)

``predict`` runs an artifact over a dataset of Ray Data, ``deployment`` and ``serve_artifact`` serve
one with Ray Serve, ``encoder_deployment`` and ``serve_encoder`` a sentence encoder, and
``tune_fleet`` is ``x86quant tune --ray``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    import ray  # noqa: F401
except ImportError as error:
    raise ImportError("x86quant.ray needs the package ray: pip install 'x86quant[ray]'") from error

if TYPE_CHECKING:
    from x86quant.ray.batch_inference import predict
    from x86quant.ray.encoder_serving import encoder_deployment, serve_encoder
    from x86quant.ray.fleet import tune_fleet
    from x86quant.ray.serving import deployment, serve_artifact

__all__ = [
    "deployment",
    "encoder_deployment",
    "predict",
    "serve_artifact",
    "serve_encoder",
    "tune_fleet",
]

# Found on first use: workers of one kind need not import what the others do.
_MODULE_OF = {
    "deployment": "serving",
    "encoder_deployment": "encoder_serving",
    "predict": "batch_inference",
    "serve_artifact": "serving",
    "serve_encoder": "encoder_serving",
    "tune_fleet": "fleet",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
