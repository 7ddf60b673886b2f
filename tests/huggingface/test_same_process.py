"""What a process has made int8 and saved it can load, without importing anything for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

SCRIPT = """
import sys, warnings
from x86quant.torchvision_import import import_torchvision; import_torchvision()
import torch, transformers, x86quant
assert "x86quant.huggingface" not in sys.modules
torch.manual_seed(0)
config = transformers.BertConfig(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=50
)
model = transformers.BertModel(config).eval()
ours = x86quant.to_dynamic(model)
ours.save_pretrained(sys.argv[1])
loaded = transformers.AutoModel.from_pretrained(sys.argv[1]).eval()
ids = torch.randint(0, 50, (2, 7))
with torch.no_grad():
    a, b = ours(ids).last_hidden_state, loaded(ids).last_hidden_state
assert torch.allclose(a, b, atol=1e-4), float((a - b).abs().max())
"""


def test_a_process_loads_what_it_saved(tmp_path: Path) -> None:
    run = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
