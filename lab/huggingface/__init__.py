"""The lab's models as Hugging Face models; importing this package registers them.

>>> from transformers import AutoConfig, AutoModelForCausalLM
>>> from lab.huggingface import LabConfig
>>> config = LabConfig(stack="doge", vocab_size=64, d_model=16)
>>> type(AutoModelForCausalLM.from_config(config)).__name__
'LabForCausalLM'
"""

from transformers import AutoConfig, AutoModelForCausalLM

from lab.huggingface.configuration import LabConfig
from lab.huggingface.model import LabForCausalLM

__all__ = ["LabConfig", "LabForCausalLM"]

AutoConfig.register(LabConfig.model_type, LabConfig, exist_ok=True)
AutoModelForCausalLM.register(LabConfig, LabForCausalLM, exist_ok=True)
