"""Audio: WAV files as samples at 16 kHz, and log-mel spectrograms by the feature extractor of transformers."""

from __future__ import annotations

import functools
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import UsageError, optional_import
from specjax.files.homes import in_home
from specjax.files.untrusted import check_file, first_line
from specjax.models.seq2seq.config import WhisperConfig

RATE, HOP = 16_000, 160
"""Samples per second, and samples per frame of a spectrogram."""
FRAMES_PER_SECOND = RATE // HOP
RATES = (1_000, 768_000)
"""The smallest and the largest rate of a file."""
MAX_BYTES = 1 << 32
PURPOSE = "reading speech needs"


def read_wav(path: str | Path) -> np.ndarray:
    """Return the samples float32[N] of a WAV file at 16 kHz, from -1 to 1. Channels are averaged.

    Raises: UsageError for a file that is missing, no WAV file, or without samples.
    """
    with optional_import("speech", PURPOSE):
        from scipy.io import wavfile
        from scipy.signal import resample_poly

    file = in_home(path)
    try:
        check_file(file)
        if file.stat().st_size > MAX_BYTES:
            raise UsageError(f"{file} has more than {MAX_BYTES:,} bytes; split it")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of chunks that are no audio
            rate, samples = wavfile.read(file)
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({error.strerror or first_line(error)}); give a WAV file") from None
    except UsageError:
        raise
    except Exception as error:  # many kinds, from a parser
        raise UsageError(f"{file} is not a WAV file that can be read ({first_line(error)}); convert it") from None
    if not RATES[0] <= rate <= RATES[1]:
        raise UsageError(f"{file} has {rate} samples per second, not {RATES[0]:,} to {RATES[1]:,}; convert it")
    waveform = _as_floats(samples)
    waveform = waveform.mean(1) if waveform.ndim > 1 else waveform
    if not waveform.size:
        raise UsageError(f"{file} has no samples; give a longer recording")
    if not np.isfinite(waveform).all():
        raise UsageError(f"{file} has samples that are not finite; convert it again")
    common = math.gcd(rate, RATE)
    return waveform if rate == RATE else np.asarray(resample_poly(waveform, RATE // common, rate // common), np.float32)


def _as_floats(samples: np.ndarray) -> np.ndarray:
    """Return samples of any type as float32 from -1 to 1."""
    if samples.dtype == np.uint8:
        return (samples.astype(np.float32) - 128) / 128
    if samples.dtype.kind == "i":
        return samples.astype(np.float32) / -float(np.iinfo(samples.dtype).min)
    return samples.astype(np.float32)


@functools.cache
def _extractor(bins: int) -> Any:
    with optional_import("speech", PURPOSE):
        from transformers import WhisperFeatureExtractor
    return WhisperFeatureExtractor(feature_size=bins)


def count_frames(audio: np.ndarray) -> int:
    """Return the number of frames that samples at 16 kHz fill, the last one perhaps in part."""
    return -(-len(audio) // HOP)


def log_mel(config: WhisperConfig, audio: np.ndarray) -> np.ndarray:
    """Return the log-mel spectrogram float32[bins, frames] of samples at 16 kHz.

    Audio of at most one window is padded with silence to a window. Longer audio keeps its length.

    Raises: UsageError for samples of another form. Whole numbers have no known scale.
    """
    samples = np.asarray(audio)
    if samples.dtype.kind != "f" or samples.ndim != 1 or not samples.size:
        raise UsageError(
            "audio must be floats [N] from -1 to 1 of one channel, such as those of read_wav, not "
            f"{samples.dtype}{list(samples.shape)}"
        )
    samples = samples.astype(np.float32)
    if not np.isfinite(samples).all():
        raise UsageError("audio has samples that are not finite; check the recording")
    size = config.source_frames * HOP
    is_short = len(samples) <= size
    options: dict[str, Any] = {"padding": "max_length", "max_length": size} if is_short else {"padding": "longest"}
    features = _extractor(config.mel_bins)(
        samples, sampling_rate=RATE, truncation=False, return_tensors="np", **options
    )  # fmt: skip
    return np.asarray(features["input_features"][0], np.float32)
