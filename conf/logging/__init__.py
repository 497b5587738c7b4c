"""How often a step is written to metrics.jsonl and shown."""
