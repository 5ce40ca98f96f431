"""Sampling on the device. All Triton, and bit-equal to what the CPU draws.

:mod:`.sampler` is what is called and explains how; it must choose the tokens of
:class:`deepinfer.sampling.sampler.Sampler`. Its launches are :mod:`.maximum`, :mod:`.race` and :mod:`.chain`, made of
:mod:`.stages` and the noise of :mod:`.gumbel`, which is :mod:`deepinfer.sampling.random` inside kernels.
:mod:`.verification` must accept the prefixes of :class:`deepinfer.speculative.gumbel_verifier.GumbelVerifier`.
"""
