"""Numerics: sampling, reproducible arithmetic, quantization, validation of settings, and arrays that span hosts."""
