"""The indexer: queries and keys in FP4, scores of compressed entries, and the choice of the best.

:mod:`.selection` is what layers call; it chooses, and must equal ``index_full`` and ``index_candidates`` of
:mod:`deepinfer.ops.index_select`. Scores: :mod:`.scores` (Triton, reading keys with :mod:`.keys`) or
:mod:`.scores_cuda`. The best of them: :mod:`.topk` (Triton) or :mod:`.topk_cuda`. :mod:`.query` (Triton) makes the
rounded query of each head.
"""
