"""DeepSeek-V4.1 in PyTorch. Needs torch, numpy, transformers and safetensors alone."""
