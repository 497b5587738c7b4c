"""Engram: n-gram memory tables, looked up by hashes of the last few tokens."""
