"""Voices made by rule: pulses at a pitch, through the resonances of vowels. Nothing to download."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RATE = 16000
Sound = NDArray[np.float32]
_VOWELS = np.array(
    [[730, 1090, 2440], [270, 2290, 3010], [300, 870, 2240], [530, 1840, 2480], [570, 840, 2410]]
)


def tone(hertz: float, seconds: float, harmonics: int, rng: np.random.Generator) -> Sound:
    """A tone with overtones, falling in strength, and some noise."""
    t = np.arange(int(RATE * seconds)) / RATE
    parts = [n for n in range(1, harmonics + 1) if hertz * n < 0.47 * RATE]
    wave = sum(rng.uniform(0.2, 1) / n * np.sin(2 * np.pi * hertz * n * t) for n in parts)
    wave = 0.3 * wave / np.abs(wave).max()
    return (wave + rng.choice([0, 0.01, 0.03]) * rng.standard_normal(len(t))).astype(np.float32)


def speaker(rng: np.random.Generator) -> tuple[float, float]:
    """A pitch, and how long the throat is."""
    return float(rng.uniform(80, 260)), float(rng.uniform(0.85, 1.2))


def speech(who: tuple[float, float], seconds: float, rng: np.random.Generator) -> Sound:
    """Vowels and breath of one speaker."""
    pitch, throat = who
    count = int(RATE * seconds)
    glide = np.interp(np.arange(count), np.linspace(0, count, 9), rng.uniform(0.85, 1.2, 9))
    phase = 2 * np.pi * np.cumsum(pitch * glide) / RATE
    vowels = _VOWELS[rng.integers(len(_VOWELS), size=9)] / throat
    peaks = np.stack([np.interp(np.arange(count), np.linspace(0, count, 9), v) for v in vowels.T])
    wave = np.zeros(count)
    for n in range(1, int(0.45 * RATE / (1.2 * pitch))):
        gains = (1 / (1 + ((pitch * glide * n - peaks) / 90) ** 2)).sum(0)
        wave += gains * np.sin(n * phase) / n**0.5
    loud = np.interp(np.arange(count), np.linspace(0, count, 25), rng.uniform(0, 1, 25) ** 2)
    breath = 0.05 * rng.standard_normal(count)
    wave = loud * (wave / np.abs(wave).max() + breath)
    return (0.4 * wave + 1e-3 * rng.standard_normal(count)).astype(np.float32)


def windows(sound: Sound, length: int, step: int) -> Sound:
    """Overlapping pieces [N, length]."""
    return np.lib.stride_tricks.sliding_window_view(sound, length)[::step].copy()
