"""What a wheel is made of, as a CycloneDX document in ``.dist-info/sboms`` (PEP 770)."""

from __future__ import annotations

import email.parser
import hashlib
import json
import uuid
from collections.abc import Mapping
from typing import Any

#: Where it goes in ``.dist-info``.
NAME = "sboms/x86quant.cdx.json"


def sbom(files: Mapping[str, bytes], *, torch: str, compiler: str) -> bytes:
    """The document for a wheel that holds ``files``; the same one for the same files.

    Args:
        files: paths in the wheel, and what they hold.
        torch: the version of torch whose headers are compiled into the extension.
        compiler: what compiled it, as it names itself.
    """
    (metadata_file,) = [name for name in files if name.endswith(".dist-info/METADATA")]
    metadata = email.parser.Parser().parsestr(files[metadata_file].decode())
    name, version = metadata["Name"], metadata["Version"]
    package = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": version,
        "description": metadata["Summary"],
        "licenses": [{"license": {"id": metadata["License-Expression"]}}],
        "purl": f"pkg:pypi/{name}@{version}",
    }
    libraries = [_library(path, data) for path, data in sorted(files.items()) if _is_binary(path)]
    headers = {
        "type": "library",
        "bom-ref": f"pkg:pypi/torch@{torch}",
        "name": "torch",
        "version": torch,
        "description": "Its headers, and those of FBGEMM that come with it, are compiled in.",
        "licenses": [{"license": {"id": "BSD-3-Clause"}}],
        "purl": f"pkg:pypi/torch@{torch.replace('+', '%2B')}",
    }
    document: dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": package,
            "properties": [{"name": "x86quant:compiler", "value": compiler}],
        },
        "components": [*libraries, headers],
        "dependencies": [
            {"ref": package["bom-ref"], "dependsOn": [one["bom-ref"] for one in libraries]},
            *({"ref": one["bom-ref"], "dependsOn": [headers["bom-ref"]]}
              for one in libraries if _reads_torch(one["name"])),
        ],
    }  # fmt: skip
    # By the content, so that building again gives the same one.
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))
    document["serialNumber"] = f"urn:uuid:{number}"
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _library(path: str, data: bytes) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": f"file:{path}",
        "name": path,
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}],
    }


def _reads_torch(path: str) -> bool:
    return path.rpartition("/")[2].startswith(("_C.", "_stock_", "_fast_"))


def _is_binary(path: str) -> bool:
    return path.endswith(".so") or ".so." in path
