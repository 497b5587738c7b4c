"""Documents to packed batches with sequence ids and Engram rows.

Needs torch, numpy and transformers alone.
"""
