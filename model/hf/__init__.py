"""DeepSeek-V4.1 as transformers knows models; importing this registers it with the Auto classes."""

from model.hf.configuration import DeepseekV41Config
from model.hf.modeling import DeepseekV41ForCausalLM, DeepseekV41Output

__all__ = ["DeepseekV41Config", "DeepseekV41ForCausalLM", "DeepseekV41Output"]
