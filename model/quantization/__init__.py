"""Low-precision number formats: cache rounding in training, decoding of released weights."""
