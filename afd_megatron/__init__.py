"""Attention-FFN disaggregated decoding of Megatron-core mixture-of-experts models."""

__version__ = "0.1.0"
