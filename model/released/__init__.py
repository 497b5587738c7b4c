"""Released checkpoints: sharded safetensors in, quantised or plain, and out again."""
