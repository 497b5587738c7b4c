"""Prepared documents on disk: tokenised once, memory-mapped ever after."""
