"""The back end "x86quant" of sentence-transformers.

    import x86quant.sentence_transformers
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(folder, backend="x86quant")
    encoder.save_pretrained("int8")

Importing this package registers the back end, for ``SentenceTransformer``, ``CrossEncoder`` and
``SparseEncoder``; sentence-transformers has no entry point for it.
"""

try:
    import sentence_transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "x86quant.sentence_transformers needs the package sentence-transformers: "
        "pip install 'x86quant[huggingface]'"
    ) from error

from x86quant.sentence_transformers.backend import BACKEND, register

__all__ = ["BACKEND"]

register()
