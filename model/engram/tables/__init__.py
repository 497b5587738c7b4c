"""Engram tables in files: released safetensors or GGUF, read by row id."""
