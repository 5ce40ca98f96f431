"""Imports every module that declares an operator."""

from deepinfer.ops import attention, compress, engram, hyper_connection, index_select, linear, moe, norm, rope

__all__ = ["attention", "compress", "engram", "hyper_connection", "index_select", "linear", "moe", "norm", "rope"]
