"""Attention: the query's latent and the window key of every row, and sparse attention over window and entries.

:mod:`.sparse_attention` chooses between CUDA (:mod:`.sparse_attention_cuda`) and Triton
(:mod:`.sparse_attention_triton`), and must equal :func:`deepinfer.ops.attention.sparse_attention` with
:func:`deepinfer.ops.rope.rotate` around it. :mod:`.query_key` is Triton alone: :func:`deepinfer.ops.norm.rms_norm`,
rotation and Q8, and the key's way into the ring.
"""
